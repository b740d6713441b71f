"""A switch of plan is safe: all ranks make it or none, no bit is lost, nothing stays behind."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.harness.plans import plan_of
from tests.harness.recipes import ALL_OVERLAPPED, BF16, CLIPPED, LLAMA, RECIPES, Recipe
from tests.harness.reshaping import events_of, nominal_of, run_job, train_stock
from tests.harness.training import Grid, assert_same_training, read_lines

pytestmark = pytest.mark.e2e

RANKS = range(4)
LLAMA_TP2_PP2 = replace(
    RECIPES[0], grid=Grid(pipelines=1, stages=2, tp=2, num_layers=4, num_microbatches=4)
)
ROUND_BYTES = 96 * 2**10
"""So small that a migration takes several rounds."""


def test_a_switch_that_fails_on_one_rank_is_a_switch_that_no_rank_makes(tmp_path: Path) -> None:
    plan = plan_of((3, [((0, 3), 3), ((1,), 1)]), (1, [((2,), 4)]))
    attempts_at = range(2, 34)
    record = run_job(
        "failing_migration",
        LLAMA_TP2_PP2,
        tmp_path,
        dict.fromkeys(attempts_at, ("plan", plan)),
        iterations=attempts_at[-1] + 1,
        env={"ROUND_BYTES": str(ROUND_BYTES)},
    )
    logs = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in RANKS]
    steps = logs[0][-1]["steps"]
    assert len([step for step in steps if step.startswith("unpacking round")]) >= 3
    # The ladder: the k-th step fails on rank k mod 4; two more faults came before it.
    faults = [("building the stage", 2), ("copying what is here", 1)]
    faults += [(step, number % 4) for number, step in enumerate(steps)]
    for log in logs:
        assert [attempt["changed"] for attempt in log] == [[]] * (len(faults) + 1)
        assert [attempt["gradients"] for attempt in log] == [[]] * (len(faults) + 1)
        assert [attempt["left_over"] for attempt in log] == [0] * (len(faults) + 1)
        assert [attempt["groups"] for attempt in log] == [0] * (len(faults) + 1)
        assert [attempt["error"] is None for attempt in log] == [False] * len(faults) + [True]
        assert log[-1]["steps"] == steps
    messages = [event["message"] for event in events_of(tmp_path, "warning")]
    assert len(messages) == len(faults)
    for message, (step, rank) in zip(messages, faults, strict=True):
        assert f"{step} failed on rank {rank}: " in message
    assert "OutOfMemoryError: CUDA out of memory." in messages[0]
    assert "RuntimeError" in messages[1]
    (migration,) = events_of(tmp_path, "migration")
    (switched,) = events_of(tmp_path, "plan")
    assert migration["iteration"] == switched["iteration"] == attempts_at[len(faults)]
    generations = [event["generation"] for event in events_of(tmp_path, "iteration")]
    assert generations == [int(n + 1 >= switched["iteration"]) for n in range(len(generations))]
    stock = train_stock(LLAMA_TP2_PP2, tmp_path, iterations=attempts_at[-1] + 1)
    assert_same_training(record, stock, relative=1e-6)


STATE = {"parameter", "exp_avg", "exp_avg_sq"}
TOURS = {
    "fp32, distributed optimizer": (
        Grid(pipelines=2, stages=2, num_microbatches=4),
        f"{LLAMA} {CLIPPED} --use-distributed-optimizer",
        STATE,
    ),
    "bf16, distributed optimizer, overlap": (
        Grid(pipelines=2, tp=2, num_microbatches=4),
        f"{LLAMA} {CLIPPED} {BF16} {ALL_OVERLAPPED}",
        STATE | {"main"},
    ),
    "bf16": (
        Grid(pipelines=2, stages=2, num_microbatches=4),
        f"{LLAMA} {CLIPPED} --bf16",
        STATE | {"main"},
    ),
}


@pytest.mark.parametrize("name", TOURS)
def test_there_and_back_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    grid, flags, kinds = TOURS[name]
    recipe = Recipe(name=name, grid=grid, flags=flags, relative=1e-3 if "bf16" in name else 1e-6)
    b = plan_of((4, [((0, 3), 3), ((1,), 1)]), standby=(2,))
    c = plan_of((1, [((3,), 4)]), (3, [((2,), 1), ((0, 1), 3)]))
    record = run_job(
        "there_and_back",
        recipe,
        tmp_path,
        {4: ("B", b), 6: ("C", c), 8: ("nominal", nominal_of(grid))},
        iterations=10,
        env={"CHECK_AT": "6,8,10"},
    )
    for rank in RANKS:
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        # Two more steps after each switch: all owners of a slice still hold the same bits.
        assert report["disputed"] == {"6": [], "8": [], "10": []}
        tour = report["tour"]
        assert set(tour["kinds"]) == kinds
        assert (tour["disputed"], tour["zero"]) == ([], [])
        assert [move["to"] for move in tour["moves"]][2] == "nominal"
        for move in tour["moves"]:
            assert move["watched"] > 2
            assert move["alive"] == [], f"rank {rank}, to {move['to']}"
            assert (move["differing"], move["lost"], move["disputed"]) == ([], [], [])
            assert move["received"] == move["missing"]
            assert sum(move["received"]) > 0
    assert events_of(tmp_path, "warning") == []
    stock = train_stock(recipe, tmp_path, iterations=10)
    assert_same_training(record, stock, relative=recipe.relative)


ITERATIONS = int(os.environ.get("MANY_SWITCHES_ITERATIONS", "60"))
SWITCH_EVERY = int(os.environ.get("MANY_SWITCHES_EVERY", "2"))
TIMEOUT_S = max(110.0, 1.5 * ITERATIONS)
MAX_SLOPE_MIB = 0.3
"""Of resident memory, for each switch."""


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_many_switches_leave_nothing_behind(tmp_path: Path) -> None:
    grid = Grid(pipelines=2, stages=2, num_microbatches=4)
    recipe = Recipe(name="many switches", grid=grid, flags=LLAMA)
    plans = [
        ("B", plan_of((4, [((0, 3), 3), ((1,), 1)]), standby=(2,))),
        ("C", plan_of((1, [((3,), 4)]), (3, [((2,), 1), ((0, 1), 3)]))),
        ("D", plan_of((2, [((2, 3), 4)]), (2, [((1,), 0), ((0,), 4)]))),
        ("nominal", nominal_of(grid)),
    ]
    at = range(SWITCH_EVERY, ITERATIONS + 1, SWITCH_EVERY)
    run_job(
        "many_switches",
        recipe,
        tmp_path,
        dict(zip(at, itertools.cycle(plans), strict=False)),
        iterations=ITERATIONS,
        env={"SAMPLE_EVERY": str(SWITCH_EVERY * len(plans))},
        timeout_s=TIMEOUT_S,
    )
    assert [event["iteration"] for event in events_of(tmp_path, "plan")] == list(at)
    assert {event["iteration"] for event in events_of(tmp_path, "migration")} >= set(at)
    assert events_of(tmp_path, "warning") == []
    slopes = []
    for rank in RANKS:
        # Each sample is taken under the nominal plan; the first one before any switch.
        samples = read_lines(tmp_path / f"rank{rank}.jsonl")[1:]
        assert len(samples) >= 3
        for name in ("threads", "descriptors", "groups", "torch_groups", "tensors"):
            counts = [sample[name] for sample in samples]
            assert max(counts) <= counts[0], f"rank {rank}: {name} {counts}"
            assert counts[0] > 0
        resident_mib = [sample["resident_bytes"] / 2**20 for sample in samples]
        switches = np.arange(len(samples)) * len(plans)
        slopes.append(float(np.polyfit(switches, resident_mib, 1)[0]))
    print(f"resident memory, MiB a switch by rank: {[round(slope, 3) for slope in slopes]}")
    assert max(slopes) < MAX_SLOPE_MIB
