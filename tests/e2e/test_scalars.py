"""The plugin's figures in Megatron's own TensorBoard and W&B writers."""

import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.ranks import run_script
from tests.harness.training import TINY_GPT, Grid, read_lines, write_json

GRID = Grid(pipelines=2, stages=1, num_microbatches=8)
PACE = {"layer_forward_s": {"1": 0.006}, "layer_backward_s": {"1": 0.012}}
SLOW = [{"gpu": 1, "rate": 4.0, "from_iteration": 3, "to_iteration": None}]
ITERATIONS = 14


def test_rates_generation_and_steps_are_curves_beside_megatrons_own(tmp_path: Path) -> None:
    lines = tmp_path / "wandb.jsonl"
    run_script(
        GRID.world,
        [
            *(
                "-m",
                "tests.e2e.wandb_script",
                *TINY_GPT,
                *GRID.flags,
                "--train-iters",
                str(ITERATIONS),
                "--malleus",
            ),
            *("--malleus-pace", write_json(tmp_path / "pace.json", PACE)),
            *("--malleus-inject", write_json(tmp_path / "slow.json", SLOW)),
            *("--malleus-log-dir", tmp_path / "log", "--tensorboard-dir", tmp_path / "board"),
            *("--tensorboard-log-interval", "1", "--wandb-project", "p"),
            *("--wandb-exp-name", "e", "--wandb-save-dir", tmp_path / "wandb"),
        ],
        env={"WANDB_LINES": str(lines)},
    )
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert "lm loss" in board.Tags()["scalars"]
    curves = {
        name: {event.step: event.value for event in board.Scalars(name)}
        for name in board.Tags()["scalars"]
        if name.startswith("malleus/")
    }
    events = read_lines(tmp_path / "log" / "events.jsonl")
    steps = {e["iteration"]: e for e in events if e["event"] == "iteration"}
    written = curves["malleus/step-time"]
    assert set(written) == set(range(1, ITERATIONS + 1))
    for iteration, seconds in written.items():
        assert math.isclose(seconds, steps[iteration]["step_time_s"], rel_tol=1e-6)
        assert curves["malleus/generation"][iteration] == steps[iteration]["generation"]
    assert max(curves["malleus/generation"].values()) >= 1
    rates = [e["rates"]["1"] for e in events if e["event"] == "rates"]
    assert math.isclose(max(curves["malleus/rate/gpu-1"].values()), max(rates), rel_tol=1e-6)
    assert "malleus/rate/gpu-0" not in curves
    plan = next(e for e in events if e["event"] == "plan")
    first = curves["malleus/predicted-step-time"][plan["iteration"]]
    assert math.isclose(first, plan["predicted"]["step_time_s"], rel_tol=1e-6)
    logged = read_lines(lines)
    assert {line["step"]: line["malleus/step-time"] for line in logged}.keys() == written.keys()
