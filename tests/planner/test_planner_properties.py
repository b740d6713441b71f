"""What must hold of any planner: monotone, blind to numbering, deterministic."""

import copy
import json
import subprocess
import sys
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from malleus_megatron.cost.bounds import node_throughput
from malleus_megatron.errors import InfeasiblePlanError
from malleus_megatron.plan.codec import plan_from_json, plan_to_json
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.planner.search import make_plan
from tests.harness.check_plan import faults
from tests.harness.problems import problem, small_problems

FEW = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MIDDLE: dict[str, Any] = {
    "model": {"num_layers": 24, "layer_time_s": {"1": 3.7, "2": 1.9, "4": 1.0}},
    "parallel": {"tensor_parallel_sizes": [1, 2, 4], "num_pipelines": 3},
}


def step_s(document: dict[str, Any]) -> tuple[float, float]:
    """Predicted step and bound; inf if there is no plan."""
    try:
        predicted = make_plan(problem_from_json(document)).predicted
    except InfeasiblePlanError:
        return float("inf"), float("inf")
    assert predicted is not None
    assert predicted.step_time_s is not None
    assert predicted.lower_bound is not None
    return predicted.step_time_s, predicted.lower_bound


def relabelled(document: dict[str, Any], order: list[int], turn: int) -> dict[str, Any]:
    """The same cluster with its nodes in another order and the GPUs of each node turned."""
    sizes = document["cluster"]["gpus_per_node"]
    starts = [0, *accumulate(sizes)]
    rates = {}
    for place, node in enumerate(order):
        base = sum(sizes[other] for other in order[:place])
        for index in range(sizes[node]):
            old = str(starts[node] + (index + turn) % sizes[node])
            if old in document["rates"]:
                rates[str(base + index)] = document["rates"][old]
    changed = copy.deepcopy(document)
    changed["cluster"]["gpus_per_node"] = [sizes[node] for node in order]
    changed["rates"] = rates
    return changed


@FEW
@given(document=small_problems(), data=st.data())
def test_slower_never_shortens_and_healthy_never_lengthens(
    document: dict[str, Any], data: st.DataObject
) -> None:
    gpu = data.draw(st.sampled_from(sorted(document["rates"])))
    rate = document["rates"][gpu]
    slower, healthy = copy.deepcopy(document), copy.deepcopy(document)
    slower["rates"][gpu] = "inf" if rate == "inf" else rate * data.draw(st.floats(1.01, 4))
    healthy["rates"][gpu] = 1.0

    now_s, _ = step_s(document)

    assert step_s(slower)[0] >= now_s * (1 - 1e-9)
    assert step_s(healthy)[0] <= now_s * (1 + 1e-9)


@settings(FEW, max_examples=5)
@given(rates=st.dictionaries(st.integers(0, 31), st.floats(1.1, 9), max_size=5), data=st.data())
def test_monotone_up_to_the_certified_gap_where_search_is_not_exact(
    rates: dict[int, float], data: st.DataObject
) -> None:
    document = problem([8] * 4, 24, 24, **MIDDLE)
    document["rates"] = {str(gpu): rate for gpu, rate in rates.items()}
    gpu = str(data.draw(st.integers(0, 31)))
    slower = copy.deepcopy(document)
    slower["rates"][gpu] = document["rates"].get(gpu, 1.0) * data.draw(st.floats(1.1, 4))

    now_s, bound_s = step_s(document)
    slower_s, slower_bound_s = step_s(slower)

    assert slower_s >= bound_s * (1 - 1e-9)
    assert now_s * bound_s / now_s <= slower_s
    assert slower_bound_s <= slower_s * (1 + 1e-9)


@FEW
@given(document=small_problems(), turn=st.integers(0, 7), flip=st.booleans())
def test_numbering_changes_no_objective(document: dict[str, Any], turn: int, flip: bool) -> None:
    order = list(range(len(document["cluster"]["gpus_per_node"])))
    other = relabelled(document, order[::-1] if flip else order, turn)
    assert step_s(other)[0] == step_s(document)[0]


@pytest.mark.parametrize("gpu", [0, 8, 16, 31])
def test_one_straggler_costs_the_same_wherever_it_is(gpu: int) -> None:
    document = problem([8] * 4, 24, 24, **MIDDLE, rates={str(gpu): 2.57})
    reference = problem([8] * 4, 24, 24, **MIDDLE, rates={"3": 2.57})
    assert step_s(document) == step_s(reference)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_same_input_same_bytes_in_any_process(hash_seed: str) -> None:
    document = problem([8] * 4, 24, 24, **MIDDLE, rates={"3": 2.57, "9": 4.0, "17": "inf"})
    here = json.dumps(plan_to_json(make_plan(problem_from_json(document))), sort_keys=True)
    program = (
        "import json, sys\n"
        "from malleus_megatron.plan.codec import plan_to_json\n"
        "from malleus_megatron.plan.problem_codec import problem_from_json\n"
        "from malleus_megatron.planner.search import make_plan\n"
        "plan = make_plan(problem_from_json(json.load(sys.stdin)))\n"
        "sys.stdout.write(json.dumps(plan_to_json(plan), sort_keys=True))\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
    )
    assert there.stdout == here


def test_a_plan_in_use_that_is_as_good_stays() -> None:
    document = problem([8] * 4, 24, 24, **MIDDLE)
    first = make_plan(problem_from_json(document))
    moved = plan_to_json(first)
    moved["pipelines"] = moved["pipelines"][::-1]
    document["current_plan"] = moved
    assert make_plan(problem_from_json(document)) == plan_from_json(moved)


def test_after_a_new_straggler_most_state_stays_where_it_was() -> None:
    document = problem([8] * 4, 24, 24, **MIDDLE)
    before = make_plan(problem_from_json(document))
    document["rates"] = {"5": 3.0}
    fresh = make_plan(problem_from_json(document))
    document["current_plan"] = plan_to_json(before)
    after = make_plan(problem_from_json(document))

    assert after.predicted is not None
    assert fresh.predicted is not None
    assert after.predicted.step_time_s == fresh.predicted.step_time_s
    assert faults(document, plan_to_json(after)) == []
    assert _kept(before, after) >= _kept(before, fresh)
    assert _kept(before, after) > 0.4


def _kept(before: Any, after: Any) -> float:
    """Share of the new plan's state that is on its GPU already."""
    held = {
        gpu: (set(range(*stage.layers)), rank / len(stage.gpus), (rank + 1) / len(stage.gpus))
        for pipeline in before.pipelines
        for stage in pipeline.stages
        for rank, gpu in enumerate(stage.gpus)
    }
    kept = 0.0
    for pipeline in after.pipelines:
        for stage in pipeline.stages:
            size = len(stage.gpus)
            for rank, gpu in enumerate(stage.gpus):
                layers, low, high = held.get(gpu, (set(), 0.0, 0.0))
                part = min(high, (rank + 1) / size) - max(low, rank / size)
                kept += max(0.0, part) * len(layers & set(range(*stage.layers)))
    return float(kept) / float(after.num_layers * len(after.pipelines))


def test_gradient_sums_stay_inside_nodes_where_they_can() -> None:
    # 4 nodes of 8 GPUs, TP 2, 4 pipelines of 4 stages: each node can hold one stage of each.
    document = problem(
        [8] * 4,
        16,
        16,
        model={"num_layers": 16, "layer_time_s": {"2": 1.0}},
        parallel={"tensor_parallel_sizes": [2], "num_pipelines": 4},
    )
    plan = make_plan(problem_from_json(document))
    for stages in zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True):
        assert len({stage.layers for stage in stages}) == 1
        assert len({gpu // 8 for stage in stages for gpu in stage.gpus}) == 1


def test_failed_gpus_nodes_and_unlike_nodes() -> None:
    rates: dict[str, Any] = {str(gpu): "inf" for gpu in range(8)}
    document = problem([8, 4, 8, 6], 24, 24, **MIDDLE, rates=rates | {"12": 1.5, "13": 1.5})
    plan = make_plan(problem_from_json(document))
    assert faults(document, plan_to_json(plan)) == []
    assert set(range(8)) <= set(plan.standby)


def test_a_gpu_that_does_not_shorten_the_step_is_on_standby() -> None:
    document = problem([8] * 4, 24, 24, **MIDDLE, rates={"3": 50.0})
    assert make_plan(problem_from_json(document)).standby == (3,)


def test_two_gpu_types_from_the_start() -> None:
    # Half of the nodes take 1.6 times as long: a plan cannot do better than their throughput.
    document = problem([8] * 4, 24, 48, **MIDDLE, rates={str(gpu): 1.6 for gpu in range(16, 32)})
    step, bound = step_s(document)
    assert bound >= 0.95 * step


def test_the_best_throughput_of_a_node_by_hand() -> None:
    times = {1: 4.0, 2: 2.0, 4: 0.9}
    assert node_throughput([1, 1, 1, 1], [1, 2, 4], times) == pytest.approx(1 / 0.9)
    assert node_throughput([1, 1, 1, 3], [1, 2, 4], times) == pytest.approx(1 / 2 + 1 / 4 + 1 / 12)
    assert node_throughput([float("inf")] * 4, [1, 2, 4], times) == 0
