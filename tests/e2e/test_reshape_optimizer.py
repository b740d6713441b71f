"""Under a plan the optimizer's state is shared out, its collectives overlap, and fp16 skips."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from malleus_megatron.plan.plan import Plan
from tests.harness.plans import plan_of
from tests.harness.ranks import run_script
from tests.harness.recipes import (
    ALL_OVERLAPPED,
    BF16,
    CLIPPED,
    LLAMA,
    SMOOTH,
    UNTIED,
    Recipe,
    random_job_plan,
)
from tests.harness.reshaping import events_of, nominal_of, run_job, train_stock
from tests.harness.training import Grid, assert_same_training, read_lines

pytestmark = pytest.mark.e2e

BYTES_A_PARAMETER = 12
"""Of bf16 training's state: an fp32 copy and two moments."""


def turned(plan: Plan) -> Plan:
    """The same work in every place, and yet no longer the nominal layout."""
    return replace(plan, pipelines=plan.pipelines[1:] + plan.pipelines[:1])


def num_parameters(recipe: Recipe, *, hidden: int, vocabulary: int) -> int:
    """Of a Llama with untied embeddings and Megatron's default width with SwiGLU, by hand."""
    ffn = 8 * hidden // 3 // 64 * 64
    layer = 2 * hidden + 4 * hidden * hidden + 3 * hidden * ffn
    return recipe.grid.num_layers * layer + hidden + 2 * vocabulary * hidden


def test_state_is_held_once_and_evenly_and_collectives_overlap(tmp_path: Path) -> None:
    grid = Grid(pipelines=2, stages=2, num_layers=6)
    flags = f"{LLAMA} {UNTIED} {BF16} {SMOOTH} {ALL_OVERLAPPED}"
    recipe = Recipe(name="state", grid=grid, flags=flags)
    nominal = nominal_of(grid)
    rng = random.Random(5)
    drawn = [random_job_plan(rng, grid, (1, 2, 4)) for _ in range(4)]
    plans = {4: ("turned", turned(nominal))}
    plans |= {8 + number: (f"drawn-{number}", plan) for number, plan in enumerate(drawn)}
    run_job("held_state", recipe, tmp_path, plans, iterations=13, env={})
    lines = {
        rank: {line["iteration"]: line for line in read_lines(tmp_path / f"rank{rank}.jsonl")}
        for rank in range(grid.world)
    }
    one_copy = BYTES_A_PARAMETER * num_parameters(recipe, hidden=64, vocabulary=128)
    names = {2: "nominal (Megatron's)", **{at: name for at, (name, _) in plans.items()}}
    held = {at: [lines[rank][at]["bytes"] for rank in lines] for at in names}
    print(f"\nbytes of optimizer state a rank; one copy: {one_copy}")
    for at, numbers in held.items():
        print(f"{names[at]:22} {numbers} sum {sum(numbers)}, {sum(numbers) / one_copy:.4f}")
    for mine, megatrons in zip(held[4], held[2], strict=True):
        assert mine == pytest.approx(megatrons, rel=0.05)
    for numbers in held.values():
        assert sum(numbers) == pytest.approx(one_copy, rel=0.02)
    # The first step under a plan counts what the backward pass reports; the next ones overlap.
    # With --align-grad-reduce, Megatron's default, later stages start theirs after their passes.
    first = {gpu for pipeline in nominal.pipelines for gpu in pipeline.stages[0].gpus}
    for rank, by_iteration in lines.items():
        assert by_iteration[4]["sums_in_backward"] == 0, f"rank {rank}"
        assert (by_iteration[6]["sums_in_backward"] > 0) == (rank in first), f"rank {rank}"
        assert by_iteration[6]["gathers_in_forward"] > 0, f"rank {rank}"


@pytest.mark.parametrize("overlap", ["", ALL_OVERLAPPED], ids=["", "overlap"])
def test_an_overflow_of_one_rank_lets_all_skip_the_step(overlap: str, tmp_path: Path) -> None:
    grid = Grid(pipelines=2, tp=2, num_microbatches=8)
    scaled = "--fp16 --use-distributed-optimizer --initial-loss-scale 4096 --hysteresis 1"
    flags = f"{LLAMA} {SMOOTH} {CLIPPED} {scaled} --loss-scale-window 2 {overlap}"
    recipe = Recipe(name="fp16", grid=grid, flags=flags)
    b = plan_of((5, [((0,), 3), ((3,), 1)]), (3, [((1, 2), 4)]))
    c = plan_of((2, [((3, 0), 1), ((1,), 3)]), (6, [((2,), 4)]))
    env = {"OVERFLOW_RANK": "3", "OVERFLOW_AT": "3,4,8,12"}
    plans = {2: ("B", b), 6: ("C", c), 11: ("nominal", nominal_of(grid))}
    ours = run_job("overflowing", recipe, tmp_path, plans, iterations=14, env=env)
    stock = tmp_path / "stock.jsonl"
    run_script(
        grid.world,
        [
            *("-m", "tests.e2e.overflowing", *recipe.words, *grid.flags),
            *("--train-iters", "14", "--malleus-record", stock),
        ],
        env=env,
        timeout_s=110,
    )
    skipped = [line["iteration"] for line in read_lines(stock) if line["skipped"]]
    assert skipped == [3, 4, 8, 12]
    assert [line["iteration"] for line in read_lines(ours) if line["skipped"]] == skipped
    assert_same_training(ours, stock, relative=5e-4)
    assert [event["iteration"] for event in events_of(tmp_path, "plan")] == [*plans]
    assert events_of(tmp_path, "warning") == []


FP16_GRID = Grid(pipelines=2, tp=2, num_microbatches=8)
NEAR_OVERFLOW = {
    # What a GPU adds up in fp16 before the average is as in stock.
    "own stages": ("--initial-loss-scale 1048576", {1: turned(nominal_of(FP16_GRID))}),
    # Only what one micro-batch gives is in fp16.
    "uneven": (
        f"--initial-loss-scale 33554432 {UNTIED} --accumulate-allreduce-grads-in-fp32",
        {
            1: plan_of((5, [((0,), 3), ((3,), 1)]), (3, [((1, 2), 4)])),
            6: plan_of((8, [((3, 0), 1), ((1,), 3)]), standby=(2,)),
        },
    ),
}


@pytest.mark.parametrize("name", NEAR_OVERFLOW)
def test_a_loss_scale_near_overflow_skips_the_steps_that_stock_skips(
    name: str, tmp_path: Path
) -> None:
    """The scale starts too high, and grows again every two steps: it is always near the edge."""
    scale, plans = NEAR_OVERFLOW[name]
    flags = f"{LLAMA} {SMOOTH} {CLIPPED} --fp16 --hysteresis 1 --loss-scale-window 2 {scale}"
    recipe = Recipe(name=name, grid=FP16_GRID, flags=flags)
    env = {"OVERFLOW_RANK": "0", "OVERFLOW_AT": "0"}  # which never comes: only the scale is at work
    named = {at: (f"plan-{at}", plan) for at, plan in plans.items()}
    ours = run_job("overflowing", recipe, tmp_path, named, iterations=11, env=env)
    stock = train_stock(recipe, tmp_path, iterations=11)
    skipped = [line["iteration"] for line in read_lines(stock) if line["skipped"]]
    assert min(skipped) < 6 < max(skipped)
    assert [line["iteration"] for line in read_lines(ours) if line["skipped"]] == skipped
    assert_same_training(ours, stock, relative=1e-3)
    assert len(events_of(tmp_path, "plan")) == len(plans)
    assert events_of(tmp_path, "warning") == []
