"""Under uneven micro-batch counts a job trains as the stock job does."""

from pathlib import Path

import pytest

from tests.harness.training import (
    Grid,
    assert_same_training,
    read_lines,
    train,
    write_schedule,
)

pytestmark = pytest.mark.e2e

FP32 = 1e-6
BF16 = 2e-4

TWO = Grid(pipelines=2)
FOUR = Grid(pipelines=4, num_microbatches=16)
TWO_BY_TWO = Grid(pipelines=2, stages=2)
TWO_TP = Grid(pipelines=2, tp=2)
GROWING = Grid(pipelines=2, growth="0:8 512:16")
BF16_FLAGS = ("--bf16", "--use-distributed-optimizer")

Case = tuple[Grid, dict[int, tuple[int, ...]], tuple[str, ...], float]
CASES: dict[str, Case] = {
    "dp2": (TWO, {2: (5, 3)}, (), FP32),
    "dp4": (FOUR, {2: (7, 1, 5, 3)}, (), FP32),
    "dp2 pp2, there and back": (TWO_BY_TWO, {2: (5, 3), 3: (1, 7), 4: (4, 4)}, (), FP32),
    "from the start": (TWO, {1: (1, 7)}, (), FP32),
    "untied embeddings": (
        TWO_BY_TWO,
        {2: (5, 3)},
        ("--untie-embeddings-and-output-weights",),
        FP32,
    ),
    "sequence parallel": (TWO_TP, {2: (5, 3)}, ("--sequence-parallel",), FP32),
    "per-token loss": (TWO, {2: (5, 3)}, ("--calculate-per-token-loss",), FP32),
    "per-token loss, dp4": (FOUR, {2: (7, 1, 5, 3)}, ("--calculate-per-token-loss",), FP32),
    "bf16, distributed optimizer": (TWO, {2: (5, 3)}, BF16_FLAGS, BF16),
    "bf16, distributed optimizer, dp4": (FOUR, {2: (7, 1, 5, 3)}, BF16_FLAGS, BF16),
    "bf16, overlapped": (
        TWO,
        {2: (5, 3), 3: (2, 6)},
        (*BF16_FLAGS, "--overlap-grad-reduce", "--overlap-param-gather"),
        BF16,
    ),
    "clipping": (TWO, {2: (5, 3)}, ("--clip-grad", "0.1"), FP32),
    "batch size grows": (GROWING, {2: (5, 3)}, (), FP32),
    "random order": (TWO, {2: (5, 3)}, ("--dataloader-type", "cyclic"), FP32),
    "evaluation": (TWO, {2: (5, 3)}, ("--eval-iters", "2", "--eval-interval", "2"), FP32),
    "data workers": (TWO_BY_TWO, {2: (5, 3), 4: (2, 6)}, ("--num-workers", "2"), FP32),
    "rerun machine": (TWO, {2: (5, 3)}, ("--rerun-mode", "validate_results"), FP32),
}
SPLITS = {"evaluation": "80,20,0"}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_are_stocks(name: str, tmp_path: Path) -> None:
    grid, counts_at, flags, relative = CASES[name]
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    recipe = (*flags, "--split", SPLITS.get(name, "100,0,0"))
    train(grid, stock, *recipe)
    schedule = write_schedule(tmp_path, grid, counts_at)
    train(
        grid,
        ours,
        *recipe,
        *("--malleus", "--malleus-sidecar", "none", "--malleus-require", "rebalance"),
        *("--malleus-plan-schedule", schedule, "--malleus-log-dir", tmp_path),
    )
    assert_same_training(ours, stock, relative=relative)
    events = read_lines(tmp_path / "events.jsonl")
    plans = [event["micro_batches"] for event in events if event["event"] == "plan"]
    assert plans == [list(counts) for counts in counts_at.values()]
    losses = [event["loss"] for event in events if event["event"] == "iteration"]
    assert losses == [line["loss"] for line in read_lines(ours)]
