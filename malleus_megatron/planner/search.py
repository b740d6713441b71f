"""From a problem to a plan: `make_plan`, the planner's front door."""

import time
from collections.abc import Callable
from dataclasses import replace

from malleus_megatron.cost.prediction import OBJECTIVES, STEP_TIME, plan_costs
from malleus_megatron.cost.validity import plan_faults
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan, PlanningNote, Prediction
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.infeasible import check_possible, no_plan
from malleus_megatron.planner.placement import PlacedPipeline, place
from malleus_megatron.planner.solve import Solution, Will, solve

type Tell = Callable[[str], None]
"""Told one line now and then in a long search."""

WORK_PER_SECOND = 30_000
"""Moves that a search looks at in about a second: turns work into deterministic time."""
AS_GOOD = 1 + 1e-9


def make_plan(
    problem: Problem,
    objective: str = STEP_TIME,
    *,
    seed: int = 0,
    tell: Tell | None = None,
) -> Plan:
    """Plan a job: deterministic, with a proved lower bound.

    Args:
        problem: What is asked.
        objective: `step-time` or `bottleneck`.
        seed: Of the kicks of the local search; small clusters are solved exactly and ignore it.
        tell: Gets a line a second in a long search.

    Returns:
        The plan. `planning.seconds` is deterministic time, so that equal problems give equal
        bytes: work done, in units of about a second.

    Raises:
        BadInputError: an unknown objective.
        InfeasiblePlanError: no plan was found; the message says what does not fit.
    """
    if objective not in OBJECTIVES:
        raise BadInputError(f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}.")
    check_possible(problem)
    costs = SearchCosts.of(problem, objective)
    solution = solve(problem, costs, Will(seed=seed, thorough=True), _paced(tell, costs.unit_s))
    if solution is None:
        raise no_plan(problem)
    plan = _unless_current_is_as_good(problem, _named(problem, objective, solution))
    priced = plan_costs(problem, plan)
    value = priced.value(objective)
    return replace(
        plan,
        predicted=Prediction(
            step_time_s=priced.step_time_s,
            bottleneck=priced.bottleneck,
            lower_bound=min(value, solution.bound_s / costs.unit_s),
            healthy_step_time_s=_healthy_step_time_s(problem, plan),
            memory_mib=priced.memory_mib,
        ),
        planning=PlanningNote(
            seconds=round(solution.work / WORK_PER_SECOND, 3), seed=seed, problem=problem.digest
        ),
    )


def _named(problem: Problem, objective: str, solution: Solution) -> Plan:
    pipelines = [
        PlacedPipeline(order=layout.order, layers=layout.split.layers, num_microbatches=count)
        for layout, count in zip(solution.layouts, solution.division.counts, strict=True)
    ]
    plan = place(problem, solution.classes, solution.cut_counts, pipelines)
    return replace(plan, objective=objective)


def _unless_current_is_as_good(problem: Problem, plan: Plan) -> Plan:
    """The plan in use, if it is valid and no slower: nothing needs to move then."""
    current = problem.current_plan
    if current is None or plan_faults(problem, current):
        return plan
    objective = plan.objective
    if plan_costs(problem, current).value(objective) > (
        plan_costs(problem, plan).value(objective) * AS_GOOD
    ):
        return plan
    used = {gpu for pipeline in current.pipelines for gpu in pipeline.gpus}
    standby = tuple(gpu for gpu in range(problem.cluster.num_gpus) if gpu not in used)
    return replace(current, objective=objective, standby=standby)


def _healthy_step_time_s(problem: Problem, plan: Plan) -> float:
    """The step if no GPU were slow: the best plan found for that, or this plan's own layout."""
    healthy = replace(problem, rates=Rates(), current_plan=None)
    own_s = plan_costs(healthy, plan).step_time_s
    solution = solve(healthy, SearchCosts.of(healthy, STEP_TIME), Will(seed=0, thorough=False))
    if solution is None:
        return own_s
    best = _named(healthy, STEP_TIME, solution)
    return min(own_s, plan_costs(healthy, best).step_time_s)


def _paced(tell: Tell | None, unit_s: float) -> Callable[[float, float], None] | None:
    """At most a line a second, and none in the first one."""
    if tell is None:
        return None
    last_s = time.monotonic()

    def progress(best_s: float, bound_s: float) -> None:
        nonlocal last_s
        if time.monotonic() < last_s + 1.0:
            return
        last_s = time.monotonic()
        proved = f", proved bound {bound_s / unit_s:.6g}" if bound_s > 0 else ""
        tell(f"planning: best so far {best_s / unit_s:.6g}{proved}")

    return progress
