"""The planner against exhaustive search on small clusters, and its bound as a proof."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from malleus_megatron.errors import InfeasiblePlanError
from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner.bound import BoundSearch
from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.exhaustive import exhaustive_value
from malleus_megatron.planner.grouping import cuts, node_classes
from malleus_megatron.planner.search import make_plan
from malleus_megatron.planner.solve import fluid_s
from tests.harness.check_plan import faults
from tests.harness.problems import problem, small_problems

OBJECTIVES = ("step-time", "bottleneck")
EVERY = settings(
    max_examples=460,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def value_of(plan: Any) -> float:
    by_name = {
        "step-time": plan.predicted.step_time_s,
        "bottleneck": plan.predicted.bottleneck,
    }
    return float(by_name[plan.objective])


@pytest.mark.parametrize("objective", OBJECTIVES)
@EVERY
@given(document=small_problems())
def test_no_plan_at_all_is_better(objective: str, document: dict[str, Any]) -> None:
    asked = problem_from_json(document)
    best = exhaustive_value(asked, objective)
    if math.isinf(best):
        with pytest.raises(InfeasiblePlanError):
            make_plan(asked, objective)
        return

    plan = make_plan(asked, objective)

    assert faults(document, plan_to_json(plan)) == []
    assert value_of(plan) == pytest.approx(best, rel=1e-9)
    assert plan.predicted is not None
    assert plan.predicted.lower_bound == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(EVERY, max_examples=80)
@given(document=small_problems())
def test_both_bounds_are_below_every_plan(objective: str, document: dict[str, Any]) -> None:
    asked = problem_from_json(document)
    best = exhaustive_value(asked, objective)
    if math.isinf(best):
        return
    costs = SearchCosts.of(asked, objective)
    classes = node_classes(asked)
    times = dict(costs.time_by_degree)
    node_cuts = [(cuts(c.rates, asked.tensor_parallel_sizes, times), len(c.nodes)) for c in classes]
    search = BoundSearch(costs, classes, node_cuts)
    best_s = best * costs.unit_s

    assert fluid_s(costs, classes) <= best_s * (1 + 1e-9)
    for share in (1.0, 1.001, 1.05):
        for whole in (False, True):
            assert not search.excludes(best_s * share * (1 + 1e-9), whole=whole)


def test_exhaustive_search_on_a_case_done_by_hand() -> None:
    # Two GPUs, rates 1 and 2, 3 layers, 4 micro-batches, one pipeline: 2 + 1 layers, both 2 s.
    document = problem([2], 3, 4, rates={"1": 2.0})
    asked = problem_from_json(document)
    assert exhaustive_value(asked, "step-time") == 2 + 2 + 3 * 2
    assert exhaustive_value(asked, "bottleneck") == 4 * 2


@settings(EVERY, max_examples=100)
@given(document=small_problems())
def test_the_search_of_large_clusters_is_valid_and_honest_on_small_ones(
    document: dict[str, Any],
) -> None:
    asked = problem_from_json(document)
    best = exhaustive_value(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("malleus_megatron.planner.solve.is_small", lambda _: False)
        try:
            plan = make_plan(asked)
        except InfeasiblePlanError:
            return
    assert faults(document, plan_to_json(plan)) == []
    assert plan.predicted is not None
    assert plan.predicted.lower_bound is not None
    assert plan.predicted.lower_bound <= best * (1 + 1e-9)
    assert value_of(plan) >= best * (1 - 1e-9)
