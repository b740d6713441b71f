"""What detection costs a step: paced runs of 8 ranks, without the plugin and with it, by turns.

What is left where both are the same is a boundary's: one exchange of the ranks' rows. Eight
processes that meet there share two cores, which hosts of GPUs need not.
"""

import statistics
from pathlib import Path

import pytest

from tests.bench.paced_jobs import Jobs, Step
from tests.bench.situations import PACED, SITUATIONS, Span
from tests.harness.training import read_lines

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1500)]

ROUNDS = 2
ITERATIONS = 12
WARM_UP = 3
HEALTHY = (Span(situation=SITUATIONS[0], start=1, end=ITERATIONS + 1),)


def test_a_step_with_detection_takes_what_it_takes_without(tmp_path: Path) -> None:
    off: list[Step] = []
    on: list[Step] = []
    for number in range(ROUNDS):
        jobs = Jobs(work=PACED, folder=tmp_path / str(number))
        off += jobs.stock(HEALTHY)[WARM_UP:]
        on += jobs.malleus(HEALTHY)[WARM_UP:]
        events = read_lines(jobs.folder / "malleus" / "events.jsonl")
        assert [event for event in events if event["event"] == "rates"], "nothing was detected"
    off_s, on_s = (statistics.median(step.seconds for step in steps) for steps in (off, on))
    print(
        f"detection off {off_s:.4f} s, on {on_s:.4f} s a step, {1e3 * (on_s - off_s):.1f} ms more, "
        f"ratio {on_s / off_s:.4f} ({len(on)} steps each, paced)"
    )
    assert on_s / off_s <= 1.005
