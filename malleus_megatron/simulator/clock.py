"""What a step takes under a plan and rates: every pipeline played, alike ones once."""

from dataclasses import dataclass, replace

from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.limits import LONGEST_S, check_within
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.schedule import play

FORWARD_SHARE = 1 / 3
"""A backward takes twice a forward: two products for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What problem.json does not say of a step."""

    forward_share: float = FORWARD_SHARE
    """The forward's part of a stage's time."""
    transfer_s: float = 0.0
    """One message between neighbouring stages."""
    gradient_sum_s: float = 0.0
    """From the end of the last pipeline to the end of the step."""

    def __post_init__(self) -> None:
        """Refuse a share outside of 0 to 1 and times that are none."""
        if not 0 <= self.forward_share <= 1:
            raise BadInputError(f"The forward share {self.forward_share} is not in 0 to 1.")
        check_within("transfer seconds", self.transfer_s, 0, LONGEST_S, unit=" s")
        check_within("gradient seconds", self.gradient_sum_s, 0, LONGEST_S, unit=" s")


def at_rates(problem: Problem, rates: Rates) -> Problem:
    """The problem as things are: every rate counts, also one below the planner's floor."""
    return replace(problem, rates=rates, rate_floor=0.0)


class StepClock:
    """Step times of one job. What was played once is remembered."""

    def __init__(self, problem: Problem, settings: StepSettings) -> None:
        """Take the job's costs; the problem's own rates play no part."""
        self.problem = problem
        self.settings = settings
        self._pipeline_s: dict[tuple[tuple[float, ...], int], float] = {}

    def step_s(self, plan: Plan, rates: Rates) -> float:
        """Seconds from the start of a step to its end.

        Raises:
            BadInputError: the plan does not fit the problem's GPUs and TP degrees.
        """
        stages = plan_costs(at_rates(self.problem, rates), plan).stage_times_s
        pipelines = zip(stages, plan.microbatch_counts, strict=True)
        slowest_s = max(self._played_s(times, count) for times, count in set(pipelines))
        return slowest_s + self.settings.gradient_sum_s

    def _played_s(self, stage_times_s: tuple[float, ...], num_microbatches: int) -> float:
        key = stage_times_s, num_microbatches
        if key not in self._pipeline_s:
            self._pipeline_s[key] = play(
                stage_times_s,
                num_microbatches,
                forward_share=self.settings.forward_share,
                transfer_s=self.settings.transfer_s,
            ).end_s
        return self._pipeline_s[key]
