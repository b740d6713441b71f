"""Paced jobs of 8 ranks with injected stragglers: who is named, at which rate, and how soon."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.plan import Plan
from tests.harness.plans import plan_of
from tests.harness.training import Grid, read_lines, train, write_json

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1500)]

PACE = {
    "layer_forward_s": {"1": 0.032, "2": 0.018, "4": 0.010},
    "layer_backward_s": {"1": 0.064, "2": 0.036, "4": 0.020},
}
LARGE = 2.57
"""From this rate on a straggler is to be named within three iterations."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and spans of iterations (from, until before) with the rates of slow GPUs."""

    grid: Grid
    slow: tuple[tuple[int, int, dict[int, float]], ...]
    plan: Plan | None = None


OF_TWO = Grid(pipelines=2, stages=2, tp=2, num_layers=8, num_microbatches=8)
UNEVEN = plan_of((7, [((0, 1, 2, 3), 8)]), (1, [((4, 5), 4), ((6,), 1), ((7,), 3)]))
LONG_AND_SHORT = plan_of((5, [((0, 1), 8)]), (3, [((2, 3), 3), ((4, 5), 3), ((6, 7), 2)]))
CASES = {
    "TP2 x PP2 x DP2": Case(
        grid=OF_TWO,
        slow=(
            *((6, 16, {1: 2.57}), (30, 44, {2: 5.42, 5: 1.5})),
            *((58, 68, {7: 12.53}), (82, 96, {4: 1.2})),
        ),
    ),
    "TP4 x DP2": Case(
        grid=Grid(pipelines=2, tp=4, num_layers=8, num_microbatches=8),
        slow=(
            *((6, 16, {6: 12.53}), (30, 44, {3: 1.2, 0: 2.57})),
            *((58, 68, {5: 5.42}), (82, 96, {1: 1.5})),
        ),
    ),
    # A straggler makes the job leave the plan: there is one span each.
    "uneven plan, TP4, 2 and 1": Case(
        grid=OF_TWO, slow=((8, 18, {1: 2.57, 6: 5.42}),), plan=UNEVEN
    ),
    "uneven plan, one slow in TP4": Case(grid=OF_TWO, slow=((8, 18, {2: 12.53}),), plan=UNEVEN),
    "uneven plan, slightly slow": Case(grid=OF_TWO, slow=((8, 24, {3: 1.2, 7: 1.5}),), plan=UNEVEN),
    "stages of 8, 3, 3 and 2 layers": Case(
        grid=OF_TWO, slow=((8, 18, {0: 5.42, 7: 2.57}),), plan=LONG_AND_SHORT
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_slow_gpus_are_named_at_their_rates(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    injected = [
        {"gpu": gpu, "rate": rate, "from_iteration": start, "to_iteration": end}
        for start, end, rates in case.slow
        for gpu, rate in rates.items()
    ]
    last = max(end for _, end, _ in case.slow)
    flags: list[Any] = [
        *("--num-layers", str(case.grid.num_layers), "--malleus", "--malleus-log-dir", tmp_path),
        *("--malleus-pace", write_json(tmp_path / "pace.json", PACE)),
        *("--malleus-inject", write_json(tmp_path / "injection.json", injected)),
    ]
    if case.plan is not None:
        path = write_json(tmp_path / "plan.json", plan_to_json(case.plan))
        flags += ["--malleus-plan", path]
    train(case.grid, tmp_path / "ours.jsonl", *flags, iterations=last, timeout_s=600)
    events = read_lines(tmp_path / "events.jsonl")
    named = [event for event in events if event["event"] == "straggler"]
    print(f"\n{name}, paced:")
    for event in named:
        print({key: event[key] for key in ("iteration", "gpu", "rate", "since", "delay")})
    for start, end, rates in case.slow:
        found = [event for event in named if start <= event["since"] < end]
        assert {event["gpu"] for event in found} == set(rates)
        for event in found:
            rate = rates[event["gpu"]]
            assert event["rate"] == pytest.approx(rate, rel=0.05)
            if rate >= LARGE:
                assert event["since"] + event["delay"] - start < 3
    assert len(named) == sum(len(rates) for _, _, rates in case.slow)
