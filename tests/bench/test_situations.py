"""What stragglers cost a paced job of 8 ranks: stock Megatron, micro-batches only, Malleus.

Writes docs/results/situations.json; scripts/results_page.py makes a page and a picture of it. It
takes more than an hour of a machine with nothing beside it: MALLEUS_BENCH_FOLDER=DIR keeps each
job's times, and the next run with it takes up where this one was broken off.
"""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.bench.comparison import Measured, compared, largest_difference, planning_ratio
from tests.bench.paced_jobs import SHORT_HELD, Jobs
from tests.bench.situations import PACED, SITUATIONS, spans

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "situations.json"


def test_malleus_follows_the_bound_in_every_situation(tmp_path: Path) -> None:
    jobs = Jobs(work=PACED, folder=Path(os.environ.get("MALLEUS_BENCH_FOLDER", tmp_path)))
    held = [situation.held for situation in SITUATIONS]
    short, long = spans(SHORT_HELD), spans(held)
    steps = {
        "stock": jobs.stock(short),
        "split": jobs.split(short),
        "malleus": jobs.malleus(long),
    }
    measured = Measured(work=PACED, held=held, steps=steps, events=jobs.events("malleus"))
    rows = compared(measured)
    document: dict[str, Any] = {
        "paced": True,
        "layer_s": {str(degree): time for degree, time in PACED.layer_s.items()},
        "held": held,
        "rows": rows,
        "longest_step_while_planning": planning_ratio(measured),
        "largest_loss_difference": largest_difference(measured.events, jobs.undisturbed(long)),
        "steps": {name: [asdict(step) for step in list(run)] for name, run in steps.items()},
        "plans": [event for event in measured.events if event["event"] == "plan"],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for row in rows:
        print(_line(row))
    assert document["largest_loss_difference"] <= 1e-6
    assert document["longest_step_while_planning"] <= 1.02
    _check_steps(rows)


def _check_steps(rows: Sequence[dict[str, Any]]) -> None:
    ratios = [row["malleus"]["to_target"] for row in rows]
    assert max(ratios) <= 1.10
    assert statistics.mean(ratios) <= 1.06
    assert rows[0]["malleus"]["to_healthy"] <= 1.01
    for row in rows:
        name = row["situation"]
        assert row["malleus"]["step_s"] <= 1.01 * row["stock"]["step_s"], name
        for job in ("stock", "split", "malleus"):
            assert 0.95 <= row[job]["to_simulated"] <= 1.05, f"{name}, {job}"
        mine = row["malleus"]
        # A plan that has no use for the GPU any more need not change when that turns slower yet.
        if row["urgent"] and mine["first_step_s"] > 1.1 * row["target_s"]:
            assert mine["iterations_to_plan"] is not None, name
            assert mine["iterations_to_plan"] <= 6, name


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(
        f"{job} {row[job]['step_s']:.2f} s (x{row[job]['to_target']:.3f} of the target, "
        f"x{row[job]['to_simulated']:.3f} of the simulated)"
        for job in ("stock", "split", "malleus")
    )
    mine = row["malleus"]
    return f"{row['situation']}: {times}; plan after {mine['iterations_to_plan']}: {mine['layout']}"
