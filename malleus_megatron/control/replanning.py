"""When the planner is asked: if what its plan depends on has moved, and not all the time."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from malleus_megatron.cost.prediction import plan_costs
from malleus_megatron.errors import InfeasiblePlanError, MalleusError
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan

_MOVED = 0.1
"""A rate or a layer time counts as moved when it has changed by this much of itself."""

_PAUSE = 4
"""Iterations without planning that follow one for each step's time that it took: planning has about
a fifth of the time at most."""

_MANY = 8
"""With more stragglers than that the planner sees their rates rounded."""
_GRID = 1.05
"""Rounded to a power of it: noise makes every GPU a kind of its own, and kinds cost time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the planner made of a problem."""

    problem: Problem
    plan: Plan | None
    seconds: float
    why: str = ""
    """Where there is no plan."""
    iteration: int = 0
    """After which it was asked."""

    def holds_for(self, problem: Problem) -> bool:
        """True if asking again would bring the same, or no more than noise makes up.

        Another layout in force is a reason to ask again, unless it is the planned one.
        """
        before, present = self.problem, problem.current_plan
        same_layout = present == before.current_plan or (
            present is not None
            and any(
                plan is not None and present.same_layout(plan)
                for plan in (self.plan, before.current_plan)
            )
        )
        return (
            same_layout
            and self._fits(problem)
            and _is_near(dict(before.rates), dict(problem.rates))
            and _is_near(dict(before.model.layer_time_s), dict(problem.model.layer_time_s))
        )

    def may_wait(self, problem: Problem, iteration: int, min_gain: float) -> bool:
        """True if planning took long a short while ago, and the job is hardly slower since.

        Its time is the planner's count of its work, so that the same observations bring the same
        decisions. A job under another layout than was asked for, or with a failed GPU at work,
        does not wait.
        """
        before, present = self.problem.current_plan, problem.current_plan
        note = None if self.plan is None else self.plan.planning
        if note is None or before is None or present is None or not present.same_layout(before):
            return False
        present_s = plan_costs(problem, present).step_time_s
        before_s = plan_costs(self.problem, before).step_time_s
        pause = int(_PAUSE * note.seconds / present_s)
        return (
            0 < iteration - self.iteration <= pause
            and self._fits(problem)
            and 1 - before_s / present_s <= min_gain
        )

    def _fits(self, problem: Problem) -> bool:
        """True if nothing but the layout in force and times are another."""
        before = self.problem
        return (
            before.num_microbatches == problem.num_microbatches
            and before.cluster == problem.cluster
            and before.model.memory == problem.model.memory
            and before.tensor_parallel_sizes == problem.tensor_parallel_sizes
        )


class Replanner:
    """Keeps the last answer. Same problems in the same order, same plans."""

    def __init__(
        self, clock: Callable[[], float], make: Callable[[Problem], Plan] = make_plan
    ) -> None:
        """Nothing is planned yet; the clock only notes how long planning took."""
        self._clock = clock
        self._make = make
        self._last: Planned | None = None

    def plan(self, problem: Problem, *, iteration: int = 0, min_gain: float = 0.0) -> Planned:
        """The planner's plan, of now or of a problem that was hardly another.

        Args:
            problem: With the layout in force.
            iteration: The last one.
            min_gain: A job that is slower by this part of its step since the planner was asked
                does not wait for its plan, however long planning takes.
        """
        last = self._last
        if last is None or not (
            last.holds_for(problem) or last.may_wait(problem, iteration, min_gain)
        ):
            self._last = last = self._ask(problem, iteration)
        return last

    def _ask(self, problem: Problem, iteration: int) -> Planned:
        start_s = self._clock()
        plan, why = None, ""
        try:
            plan = _in_rank_order(self._make_any(_with_few_kinds(problem)))
        except (MalleusError, AssertionError) as error:  # a fault of the planner ends no job
            why = f"There is no plan of another layout: {error or type(error).__name__}"
        return Planned(
            problem=problem,
            plan=plan,
            seconds=self._clock() - start_s,
            why=why,
            iteration=iteration,
        )

    def _make_any(self, problem: Problem) -> Plan:
        """With as many pipelines as the problem asks for; where they do not fit, with any."""
        try:
            return self._make(problem)
        except InfeasiblePlanError:
            return self._make(replace(problem, num_pipelines=None))


def _with_few_kinds(problem: Problem) -> Problem:
    rates = dict(problem.rates)
    if len(rates) <= _MANY:
        return problem
    rounded = {
        gpu: rate if math.isinf(rate) else _GRID ** round(math.log(rate, _GRID))
        for gpu, rate in rates.items()
    }
    return replace(problem, rates=Rates.of(rounded))


def _in_rank_order(plan: Plan) -> Plan:
    """The same groups with their GPUs ascending: a process group sorts its ranks."""
    pipelines = tuple(
        Pipeline(
            num_microbatches=pipeline.num_microbatches,
            stages=tuple(
                Stage(gpus=tuple(sorted(stage.gpus)), layers=stage.layers)
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _is_near(before: Mapping[int, float], now: Mapping[int, float]) -> bool:
    return before.keys() == now.keys() and all(
        _ratio(before[key], now[key]) <= 1 + _MOVED for key in before
    )


def _ratio(one: float, other: float) -> float:
    """The larger over the smaller; failed GPUs are alike."""
    return 1.0 if one == other else max(one, other) / min(one, other)
