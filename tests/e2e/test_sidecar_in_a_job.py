"""A job with its sidecar: re-plans by itself, and trains on when the sidecar dies."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from malleus_megatron.plan.codec import plan_from_json
from tests.harness.training import Grid, assert_same_training, read_lines, train, write_json

pytestmark = pytest.mark.e2e

TWO_BY_TWO = Grid(pipelines=2, stages=2, num_microbatches=16)
PACE = {"layer_forward_s": {"1": 0.008}, "layer_backward_s": {"1": 0.016}}


def test_a_slow_gpu_gets_fewer_micro_batches_and_the_loss_stays(tmp_path: Path) -> None:
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(TWO_BY_TWO, stock, iterations=12)
    injected = [{"gpu": 3, "rate": 3.0, "from_iteration": 4, "to_iteration": None}]
    train(
        TWO_BY_TWO,
        ours,
        "--malleus",
        *("--malleus-pace", write_json(tmp_path / "pace.json", PACE)),
        *("--malleus-inject", write_json(tmp_path / "injection.json", injected)),
        *("--malleus-log-dir", tmp_path),
        iterations=12,
    )
    assert_same_training(ours, stock, relative=1e-6)
    events = read_lines(tmp_path / "events.jsonl")
    named = [event["gpu"] for event in events if event["event"] == "straggler"]
    assert named == [3]
    plans = [event for event in events if event["event"] == "plan"]
    assert [plan["generation"] for plan in plans] == list(range(1, len(plans) + 1))
    assert sum(plans[-1]["micro_batches"]) == 16
    last = tmp_path / "plans" / f"generation-{plans[-1]['generation']}.json"
    plan = plan_from_json(json.loads(last.read_text(encoding="utf-8")))
    of_gpu_3 = sum(
        pipeline.num_microbatches * stage.num_layers
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if 3 in stage.gpus
    )
    assert of_gpu_3 < 0.8 * 8 * plan.num_layers / 2  # of its share under the recipe
    rates = [event["rates"] for event in events if event["event"] == "rates"][-1]
    assert rates["3"] == pytest.approx(3.0, rel=0.2)
    assert (tmp_path / "plans" / "generation-1.json").exists()


def kill_the_sidecar(events: Path, done: threading.Event) -> None:
    """Once two iterations are through, kill every sidecar below this process."""
    while not done.is_set():
        if events.exists() and events.read_text().count('"event": "iteration"') >= 2:
            for process in psutil.process_iter(["cmdline"]):
                words = process.info["cmdline"] or []
                if "malleus_megatron.sidecar" in words and _is_ours(process):
                    os.kill(process.pid, signal.SIGKILL)
                    return
        time.sleep(0.05)


def _is_ours(process: psutil.Process) -> bool:
    return any(parent.pid == os.getpid() for parent in process.parents())


def test_training_goes_on_when_the_sidecar_is_killed(tmp_path: Path) -> None:
    done = threading.Event()
    events = tmp_path / "events.jsonl"
    killer = threading.Thread(target=kill_the_sidecar, args=(events, done))
    killer.start()
    try:
        train(
            TWO_BY_TWO,
            tmp_path / "losses.jsonl",
            "--malleus",
            *("--malleus-pace", write_json(tmp_path / "pace.json", PACE)),
            *("--malleus-log-dir", tmp_path),
            iterations=10,
        )
    finally:
        done.set()
        killer.join()
    written = read_lines(events)
    warnings = [event["message"] for event in written if event["event"] == "warning"]
    assert any("sidecar" in message.lower() for message in warnings), warnings
    iterations = [event["iteration"] for event in written if event["event"] == "iteration"]
    assert iterations == list(range(1, 11))


def test_without_a_straggler_the_losses_are_stocks_bit_for_bit(tmp_path: Path) -> None:
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(TWO_BY_TWO, stock, iterations=5)
    train(TWO_BY_TWO, ours, "--malleus", "--malleus-log-dir", tmp_path, iterations=5)
    assert_same_training(ours, stock, relative=0)


def test_with_dropout_a_tp_group_draws_what_it_draws_in_stock(tmp_path: Path) -> None:
    """Random numbers that one rank alone draws would let its TP group's copies drift apart."""
    grid = Grid(pipelines=2, tp=2, num_microbatches=4)
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(grid, stock, *dropout, iterations=4)
    train(
        grid,
        ours,
        *("--malleus", "--malleus-sidecar", "none", "--malleus-check-replicas", "1"),
        *("--malleus-on-bad-replica", "stop", *dropout),
        iterations=4,
    )
    assert_same_training(ours, stock, relative=0)


def test_a_gpu_that_heals_on_standby_comes_back(tmp_path: Path) -> None:
    grid = Grid(pipelines=1, stages=2, tp=2, num_microbatches=8)
    pace = {
        "layer_forward_s": {"1": 0.03, "2": 0.016},
        "layer_backward_s": {"1": 0.06, "2": 0.032},
    }
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(grid, stock, iterations=26)
    injected = [{"gpu": 0, "rate": 9.0, "from_iteration": 4, "to_iteration": 14}]
    train(
        grid,
        ours,
        "--malleus",
        *("--malleus-pace", write_json(tmp_path / "pace.json", pace)),
        *("--malleus-inject", write_json(tmp_path / "injection.json", injected)),
        *("--malleus-log-dir", tmp_path),
        iterations=26,
    )
    assert_same_training(ours, stock, relative=1e-6)
    events = read_lines(tmp_path / "events.jsonl")
    layouts = [event["layout"] for event in events if event["event"] == "plan"]
    assert any(layout.endswith("standby 0") for layout in layouts), "GPU 0 never left the plan"
    assert "standby" not in layouts[-1], "GPU 0 never came back"
    # Its probes, nine times as long as a healthy GPU's, do not hold up the others' steps.
    steps = {e["iteration"]: e["step_time_s"] for e in events if e["event"] == "iteration"}
    left = next(e["iteration"] for e in events if e["event"] == "plan")
    assert left < 13
    assert max(steps[number] for number in range(left, 14)) < 1.5 * steps[15]
    named = [event["gpu"] for event in events if event["event"] == "straggler"]
    assert set(named) == {0}
