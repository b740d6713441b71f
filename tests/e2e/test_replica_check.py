"""A bit that flips on one GPU is found at the next check, named, and made good if asked."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from malleus_megatron.plan.plan import Plan
from tests.harness.plans import plan_of
from tests.harness.ranks import RankOutcome, run_script
from tests.harness.recipes import BASE, BF16, CLIPPED, GPT2, GROUPED, LLAMA
from tests.harness.reshaping import events_of, write_plans
from tests.harness.training import Grid, assert_same_training, read_lines, train

pytestmark = pytest.mark.e2e

Flip = tuple[int, int, str, str, int]
"""Iteration, rank, what of the parameter, how its name ends, how often."""

DP4 = Grid(pipelines=4, num_layers=2)
TP2_DP2 = Grid(pipelines=2, tp=2, num_layers=4)
MIXED = plan_of((3, [((2, 3), 4)]), (5, [((1,), 3), ((0,), 1)]))
"""TP 2 beside two stages of one GPU: a tied embedding and layernorms with three owners."""


def words(grid: Grid, flags: str, iterations: int) -> list[str]:
    return [
        *(*BASE, *flags.split(), "--num-layers", str(grid.num_layers), *grid.flags),
        *("--train-iters", str(iterations)),
    ]


def run(
    folder: Path,
    line: Sequence[str],
    *,
    flips: Sequence[Flip] = (),
    fails: tuple[int, int] = (1000, 0),
    policy: str = "warn",
    every: int = 2,
    plans_at: Mapping[int, Plan] | None = None,
    expect_exit: int = 0,
) -> list[RankOutcome]:
    """Run a job of four ranks; its record and its events lie in the folder."""
    return run_script(
        4,
        [
            *("-m", "tests.e2e.flipped_bit", *line, "--malleus", "--malleus-sidecar", "none"),
            *("--malleus-plan-schedule", write_plans(folder, plans_at or {})),
            *("--malleus-record", folder / "ours.jsonl", "--malleus-log-dir", folder),
            *("--malleus-check-replicas", str(every), "--malleus-on-bad-replica", policy),
        ],
        env={"FLIPS": json.dumps(flips), "FAILS": json.dumps(fails)},
        expect_exit=expect_exit,
    )


def stock(folder: Path, grid: Grid, flags: str, iterations: int) -> Path:
    path = folder / "stock.jsonl"
    train(
        grid,
        path,
        recipe=[*BASE, *flags.split(), "--num-layers", str(grid.num_layers)],
        iterations=iterations,
    )
    return path


def test_under_the_nominal_plan_flips_are_repaired_from_the_majority(tmp_path: Path) -> None:
    flags = f"{LLAMA} {CLIPPED}"
    flips = [
        (2, 0, "parameter", "linear_fc1.weight", 1),
        (4, 2, "exp_avg_sq", "final_layernorm.weight", 1),
        (4, 1, "parameter", "word_embeddings.weight", 1),
        # It does not hold; a moment is used after the last iteration's loss.
        (6, 3, "exp_avg", "final_layernorm.weight", 2),
    ]
    run(tmp_path, words(DP4, flags, 6), flips=flips, policy="repair")
    found = events_of(tmp_path, "replica")
    named = [
        (event["iteration"], event["gpu"], event["state"], event["parameter"]) for event in found
    ]
    assert sorted(named) == [
        (2, 0, "parameter", "decoder.layers.0.mlp.linear_fc1.weight"),
        (4, 1, "parameter", "embedding.word_embeddings.weight"),
        (4, 2, "exp_avg_sq", "decoder.final_layernorm.weight"),
        (6, 3, "exp_avg", "decoder.final_layernorm.weight"),
    ]
    assert all(event["is_certain"] and event["action"] == "repair" for event in found)
    assert [event["good_gpu"] for event in found if event["gpu"] == 0] == [1]
    (warning,) = events_of(tmp_path, "warning")
    assert "After the repair GPU 3 differs from GPU 0" in warning["message"]
    reference = stock(tmp_path, DP4, flags, 6)
    assert_same_training(tmp_path / "ours.jsonl", reference, relative=0)


def test_a_difference_that_stays_is_told_once(tmp_path: Path) -> None:
    """At level rebalance, of two owners: without the distributed optimizer nothing mends a copy.

    A check that fails on one rank is the last one on all of them, and the job goes on.
    """
    flags = f"{GPT2} --log-params-norm"
    flips = [(3, 2, "parameter", "linear_proj.weight", 1)]
    outcomes = run(tmp_path, words(TP2_DP2, flags, 10), flips=flips, fails=(8, 3))
    assert [event["level"] for event in events_of(tmp_path, "level")] == ["rebalance"]
    (found,) = events_of(tmp_path, "replica")
    assert (found["iteration"], found["gpu"], found["good_gpu"]) == (4, 2, 0)
    assert found["parameter"] == "decoder.layers.0.self_attention.linear_proj.weight"
    assert (found["is_certain"], found["action"]) == (False, "warn")
    said = "warning: iteration 4: GPU 2 differs from GPU 0, which may be the wrong one"
    assert outcomes[0].output.count(said) == 1
    assert outcomes[0].output.count("differs from") == 1
    (warning,) = events_of(tmp_path, "warning")
    assert "not compared from now on: listing the replicas failed on rank 3" in warning["message"]
    assert len(events_of(tmp_path, "iteration")) == 10


def test_under_a_plan_flips_are_repaired_before_a_step_uses_them(tmp_path: Path) -> None:
    flags = f"{LLAMA} {GROUPED}"
    flips = [
        (3, 1, "parameter", "linear_fc2.weight", 1),
        (4, 0, "parameter", "word_embeddings.weight", 1),
    ]
    run(
        tmp_path,
        words(TP2_DP2, flags, 6),
        flips=flips,
        policy="repair",
        every=1,
        plans_at={2: MIXED},
    )
    found = events_of(tmp_path, "replica")
    named = [(event["iteration"], event["gpu"], event["parameter"]) for event in found]
    assert named == [
        (3, 1, "decoder.layers.0.mlp.linear_fc2.weight"),
        (4, 0, "embedding.word_embeddings.weight"),
    ]
    assert [event["is_certain"] for event in found] == [False, True]
    assert [event["good_gpu"] for event in found] == [2, 2]
    assert events_of(tmp_path, "warning") == []
    reference = stock(tmp_path, TP2_DP2, flags, 6)
    assert_same_training(tmp_path / "ours.jsonl", reference, relative=1e-6)


def test_told_to_stop_all_ranks_end_with_the_reason(tmp_path: Path) -> None:
    outcomes = run(
        tmp_path,
        words(TP2_DP2, LLAMA, 6),
        flips=[(4, 1, "parameter", "linear_qkv.weight", 1)],
        policy="stop",
        plans_at={2: MIXED},
        expect_exit=2,
    )
    (line,) = [one for one in outcomes[0].output.splitlines() if "Training has stopped" in one]
    assert line.startswith("malleus: Before iteration 4: GPU 1 differs from GPU 2")
    assert "linear_qkv.weight" in line
    assert "last checkpoint" in line
    assert [event["action"] for event in events_of(tmp_path, "replica")] == ["stop"]
    assert len(read_lines(tmp_path / "ours.jsonl")) == 3


HEALTHY = {
    "tied, sequence parallel": (TP2_DP2, f"{LLAMA} --sequence-parallel", {2: MIXED}),
    "bf16, distributed optimizer": (TP2_DP2, f"{GPT2} {BF16}", {3: MIXED}),
    "bf16, stages": (Grid(pipelines=2, stages=2), f"{LLAMA} --bf16", {}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_job_gives_no_alarm(name: str, tmp_path: Path) -> None:
    grid, flags, plans_at = HEALTHY[name]
    run(tmp_path, words(grid, flags, 5), every=1, plans_at=plans_at)
    assert len(events_of(tmp_path, "iteration")) == 5
    assert events_of(tmp_path, "replica") == []
    assert events_of(tmp_path, "warning") == []


def test_a_gather_that_waits_for_the_next_forward_pass_is_done_before(tmp_path: Path) -> None:
    grid = Grid(pipelines=2, stages=2)
    flags = f"{GPT2} {BF16} --overlap-grad-reduce --overlap-param-gather"
    run(tmp_path, words(grid, flags, 5), every=1)
    assert events_of(tmp_path, "replica") == []
    assert events_of(tmp_path, "warning") == []
    reference = stock(tmp_path, grid, flags, 5)
    assert_same_training(tmp_path / "ours.jsonl", reference, relative=0)
