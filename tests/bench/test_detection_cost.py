"""What detection costs a step: paced runs of 8 ranks, without the plugin and with it, by turns."""

import statistics
from pathlib import Path

import pytest

from tests.bench.test_seams import PACE, step_times
from tests.harness.training import read_lines, write_json

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1500)]

ROUNDS = 3


def test_a_step_with_detection_takes_what_it_takes_without(tmp_path: Path) -> None:
    pace = write_json(tmp_path / "pace.json", PACE)
    off: list[float] = []
    on: list[float] = []
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        log = folder / "log"
        ours = ["--malleus", "--malleus-pace", str(pace), "--malleus-log-dir", str(log)]
        off += step_times(folder / "off", env={"STOCK_PACE": str(pace)})
        on += step_times(folder / "on", *ours)
        events = read_lines(log / "events.jsonl")
        assert [event for event in events if event["event"] == "rates"], "nothing was detected"
    ratio = statistics.median(on) / statistics.median(off)
    print(
        f"detection off {statistics.median(off):.4f} s, on {statistics.median(on):.4f} s a step, "
        f"ratio {ratio:.4f} ({len(on)} steps each, paced)"
    )
    assert ratio <= 1.005
