"""A probe on demand in a running job: its rates are the steps'."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.harness.ranks import free_port
from tests.harness.training import Grid, assert_same_training, read_lines, train, write_json

pytestmark = pytest.mark.e2e

PACE = {
    "layer_forward_s": {"1": 0.012, "2": 0.008},
    "layer_backward_s": {"1": 0.024, "2": 0.016},
}
GRID = Grid(pipelines=2, tp=2, num_microbatches=8)
RATES = {1: 2.0, 2: 1.5}
ITERATIONS = 24


class Asker(threading.Thread):
    """Asks the sidecar for a probe once the job has run some iterations."""

    def __init__(self, port: int, events: Path, after: int) -> None:
        super().__init__()
        self.port, self.events, self.after = port, events, after
        self.done = threading.Event()
        self.answer: dict[str, str] = {}

    def run(self) -> None:
        while not self.done.wait(0.05):
            if self.events.exists() and self._iterations() >= self.after:
                # The sidecar may still be starting, or not know the job yet.
                with contextlib.suppress(urllib.error.URLError):
                    self.answer = self._ask()
                    return

    def _ask(self) -> dict[str, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/probe",
            data=b'{"schema_version": 1}',
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            answer: dict[str, str] = json.loads(reply.read())
        return answer

    def _iterations(self) -> int:
        return self.events.read_text(encoding="utf-8").count('"event": "iteration"')


@pytest.mark.parametrize("level", ["reshape", "observe"])
def test_a_probe_that_is_asked_for_shows_the_rates_of_the_steps(tmp_path: Path, level: str) -> None:
    port, log = free_port(), tmp_path / "log"
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(GRID, stock, iterations=ITERATIONS)
    asker = Asker(port, log / "events.jsonl", after=5)
    asker.start()
    injected = [{"gpu": gpu, "rate": rate, "from_iteration": 1} for gpu, rate in RATES.items()]
    recipe = ["--iterations-to-skip", "999"] if level == "observe" else []
    try:
        train(
            GRID,
            ours,
            *("--malleus", "--malleus-listen", f"127.0.0.1:{port}", *recipe),
            *("--malleus-pace", write_json(tmp_path / "pace.json", PACE)),
            *("--malleus-inject", write_json(tmp_path / "injection.json", injected)),
            *("--malleus-log-dir", log),
            iterations=ITERATIONS,
        )
    finally:
        asker.done.set()
        asker.join()
    assert asker.answer["probe"] == "with the next iteration"
    assert_same_training(ours, stock, relative=1e-6)
    events = read_lines(log / "events.jsonl")
    assert {e["level"] for e in events if e["event"] == "level"} == {level}
    (probe,) = (event for event in events if event["event"] == "probe")
    assert sorted(map(int, probe["rates"])) == [0, 1, 2, 3]
    for gpu in range(4):
        assert probe["rates"][str(gpu)] == pytest.approx(RATES.get(gpu, 1.0), rel=0.1), gpu
    in_steps = [event["rates"] for event in events if event["event"] == "rates"][-1]
    for gpu in range(4):
        assert probe["rates"][str(gpu)] == pytest.approx(in_steps[str(gpu)], rel=0.1), gpu
