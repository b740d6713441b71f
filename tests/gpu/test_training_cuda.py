"""A job on one real GPU with NCCL: stock, under --malleus, and with an injected straggler."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.training import TINY_GPT, assert_same_training, read_lines, write_json

pytestmark = pytest.mark.gpu

ITERATIONS = 12
INJECTED_FROM = 7
SIZES = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --global-batch-size 8 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion --bf16"
).split()


def train(record: Path, *flags: str) -> None:
    """One rank through torchrun; the recipe's own backend, which is NCCL."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "1", "-m", "malleus_megatron.pretrain_gpt", *TINY_GPT, *SIZES]
    command += ["--train-iters", str(ITERATIONS), "--malleus-device", "cuda"]
    command += ["--malleus-record", str(record), *flags]
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "CPU mode" not in done.stderr


@pytest.mark.timeout(700)
def test_losses_are_stocks_and_every_iteration_is_measured(tmp_path: Path) -> None:
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(stock)
    train(ours, "--malleus", "--malleus-log-dir", str(tmp_path))
    assert_same_training(ours, stock, relative=0)
    events = read_lines(tmp_path / "events.jsonl")
    level = next(event for event in events if event["event"] == "level")
    assert level["level"] == "reshape"
    rates = [event["rates"] for event in events if event["event"] == "rates"]
    assert rates, "no timing of the layers has reached the sidecar"
    assert rates[-1]["0"] == pytest.approx(1.0)


@pytest.mark.timeout(700)
def test_an_injected_rate_lengthens_the_steps(tmp_path: Path) -> None:
    entry = {"gpu": 0, "rate": 3.0, "from_iteration": INJECTED_FROM, "to_iteration": None}
    injection = write_json(tmp_path / "injection.json", [entry])
    train(
        tmp_path / "losses.jsonl",
        *("--malleus", "--malleus-log-dir", str(tmp_path), "--malleus-inject", str(injection)),
    )
    steps = [e for e in read_lines(tmp_path / "events.jsonl") if e["event"] == "iteration"]
    before = statistics.median(
        step["step_time_s"] for step in steps if 3 <= step["iteration"] < INJECTED_FROM
    )
    after = statistics.median(
        step["step_time_s"] for step in steps if step["iteration"] >= INJECTED_FROM + 2
    )
    # Embedding, head and optimizer are not slowed, so the step grows by less than the rate.
    assert 1.8 < after / before < 3.2
