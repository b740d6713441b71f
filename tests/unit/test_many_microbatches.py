"""Many micro-batches: planning takes no longer, and no proof is lost."""

from typing import Any

import pytest

from malleus_megatron.cost.prediction import BOTTLENECK, OBJECTIVES, STEP_TIME
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner import division, mixes
from malleus_megatron.planner.bound import BoundSearch, hull_at, least_price
from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.grouping import cuts, node_classes
from malleus_megatron.planner.mixes import Mix
from malleus_megatron.planner.search import make_plan
from tests.harness.problems import problem

MEMORY = {"reference_tp": 2, "layer_mib_by_inflight": [100, 130], "fixed_mib": 50}
RATES = {"0": 5.0, "3": 1.7, "9": 2.2}
LIMIT_S = {STEP_TIME: 2300.0, BOTTLENECK: 2400.0}
"""About what 3,000 micro-batches take."""


def asked(num_microbatches: int, **changes: Any) -> dict[str, Any]:
    """16 GPUs, three of them slow, memory tight."""
    document = problem([8, 8], 12, num_microbatches, rates=RATES, cluster={"memory_mib": 1000})
    document["model"] |= {"layer_time_s": {"1": 1.0, "2": 0.55}, "memory": MEMORY}
    document["parallel"] = {"tensor_parallel_sizes": [1, 2], "num_pipelines": 3}
    return document | changes


def curve(objective: str, num_microbatches: int, *, whole: bool) -> list[Mix]:
    """Least prices of pipelines under throughput prices."""
    costs = SearchCosts.of(problem_from_json(asked(num_microbatches)), objective)
    classes = node_classes(costs.problem)
    times = dict(costs.time_by_degree)
    node_cuts = [(cuts(c.rates, (1, 2), times), len(c.nodes)) for c in classes]
    bound = BoundSearch(costs, classes, node_cuts)
    limit_s = LIMIT_S[objective] * num_microbatches / 3000
    earned = (lambda num: 12.0 + num / num_microbatches) if whole else None
    return bound.mixer.curve(bound.prices.by_group, limit_s, earned)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("whole", [False, True])
def test_where_costs_turn_is_enough_for_the_same_bound(
    objective: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = curve(objective, 3000, whole=whole)
    monkeypatch.setattr(mixes, "EACH", 3000)
    each = curve(objective, 3000, whole=whole)

    assert 10 < len(turns) < len(each) / 2
    assert turns[-1].num_microbatches == each[-1].num_microbatches
    points = [[(mix.num_microbatches, mix.price) for mix in found] for found in (turns, each)]
    for num in range(1, each[-1].num_microbatches + 1):
        ours, all_of_them = (hull_at(found, num) for found in points)
        assert ours == pytest.approx(all_of_them, rel=1e-9)
    ours, all_of_them = (least_price(found, 3000, None) for found in points)
    assert ours == pytest.approx(all_of_them, rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_is_looked_at_does_not_grow(objective: str) -> None:
    assert len(curve(objective, 1_000_000, whole=True)) < 3000


def value_and_bound(num_microbatches: int, objective: str) -> tuple[float, float]:
    """Of the plan that is found."""
    plan = make_plan(problem_from_json(asked(num_microbatches)), objective)
    assert plan.num_microbatches == num_microbatches
    predicted = plan.predicted
    assert predicted is not None
    value = predicted.step_time_s if objective == STEP_TIME else predicted.bottleneck
    assert value is not None
    assert predicted.lower_bound is not None
    return value, predicted.lower_bound


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_million_microbatches_are_planned_as_closely_as_a_thousand(objective: str) -> None:
    few, few_bound = value_and_bound(1000, objective)
    many, many_bound = value_and_bound(1_000_000, objective)
    assert many_bound <= many
    assert many_bound / many >= few_bound / few - 0.02


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_looking_at_each_finds_no_more(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, bound = value_and_bound(3000, objective)
    monkeypatch.setattr(division, "FEW_LEFT", 3000)
    monkeypatch.setattr(mixes, "EACH", 3000)
    value_of_each, bound_of_each = value_and_bound(3000, objective)
    assert value == pytest.approx(value_of_each, rel=1e-3)
    assert bound == pytest.approx(bound_of_each, rel=0.02)
