"""When the planner is asked: only if what its plan depends on has moved."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from malleus_megatron.errors import InfeasiblePlanError, MalleusError
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan

_MOVED = 0.1
"""A rate or a layer time counts as moved when it has changed by this much of itself."""

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
            and before.num_microbatches == problem.num_microbatches
            and before.cluster == problem.cluster
            and before.model.memory == problem.model.memory
            and before.tensor_parallel_sizes == problem.tensor_parallel_sizes
            and _is_near(dict(before.rates), dict(problem.rates))
            and _is_near(dict(before.model.layer_time_s), dict(problem.model.layer_time_s))
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

    def plan(self, problem: Problem) -> Planned:
        """The planner's plan, of now or of a problem that was hardly another."""
        if self._last is None or not self._last.holds_for(problem):
            self._last = self._ask(problem)
        return self._last

    def _ask(self, problem: Problem) -> Planned:
        start_s = self._clock()
        plan, why = None, ""
        try:
            plan = _in_rank_order(self._make_any(_with_few_kinds(problem)))
        except (MalleusError, AssertionError) as error:  # a fault of the planner ends no job
            why = f"There is no plan of another layout: {error or type(error).__name__}"
        return Planned(problem=problem, plan=plan, seconds=self._clock() - start_s, why=why)

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
