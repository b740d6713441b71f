"""What the seams cost a step: paced runs of 8 ranks, stock and ours by turns."""

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from malleus_megatron.plan.codec import plan_from_json, plan_to_json
from tests.harness.ranks import run_script
from tests.harness.training import TINY_GPT, Grid, read_lines, write_json

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1500)]

GRID = Grid(pipelines=4, stages=2, num_microbatches=16, num_layers=8)
PACE = {"layer_forward_s": {"1": 0.03}, "layer_backward_s": {"1": 0.06}}
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
ITERATIONS = 16
WARM_UP = 3
ROUNDS = 2


def step_times(folder: Path, *flags: str, env: dict[str, str] | None = None) -> list[float]:
    """Seconds from the beginning of one step to that of the next, boundary included."""
    folder.mkdir(parents=True)
    times = folder / "times.json"
    run_script(
        GRID.world,
        [
            *("-m", "tests.bench.timed_job", *TINY_GPT, *GRID.flags),
            *("--num-layers", str(GRID.num_layers), "--train-iters", str(ITERATIONS)),
            *(*OVERLAP, *flags),
        ],
        env={"STEP_TIMES": str(times), **(env or {})},
        timeout_s=400,
    )
    begun = json.loads(times.read_text(encoding="utf-8"))
    return [b - a for a, b in itertools.pairwise(begun)][WARM_UP:]


def test_seams_and_the_malleable_path_cost_little(tmp_path: Path) -> None:
    pace = write_json(tmp_path / "pace.json", PACE)
    nominal = plan_from_json(GRID.plan((4, 4, 4, 4)))
    # The same work, but no longer the nominal layout: it runs on stages of our own.
    turned = replace(nominal, pipelines=nominal.pipelines[1:] + nominal.pipelines[:1])
    plan = write_json(tmp_path / "plan.json", plan_to_json(turned))
    ours = ["--malleus", "--malleus-sidecar", "none", "--malleus-pace", str(pace)]
    seconds: dict[str, list[float]] = {"stock": [], "seams": [], "malleable": []}
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        seconds["stock"] += step_times(folder / "stock", env={"STOCK_PACE": str(pace)})
        log = ["--malleus-log-dir", str(folder / "log")]
        seconds["seams"] += step_times(folder / "seams", *ours, *log)
        seconds["malleable"] += step_times(folder / "malleable", *ours, "--malleus-plan", str(plan))
        events = read_lines(folder / "log" / "events.jsonl")
        misses = [event for event in events if event["event"] == "pace"]
        print(f"round {number}: pace misses {misses or 'none'}")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        ratio = median[name] / median["stock"]
        print(
            f"{name:10} median {median[name]:.4f} s, {ratio:.4f} of stock, "
            f"from {min(values):.4f} to {max(values):.4f} s over {len(values)} steps (paced)"
        )
    assert median["seams"] <= 1.01 * median["stock"]
    assert median["malleable"] <= 1.02 * median["stock"]
