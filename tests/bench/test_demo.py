"""The whole demo, as a newcomer runs it: two stragglers, healing, the recipe again at the end."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_commands import malleus

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]


def test_the_demo_comes_back_to_the_recipes_plan(tmp_path: Path) -> None:
    status, out, err = malleus("demo", "--json", "--out", str(tmp_path), timeout_s=880)
    assert status == 0, err
    summary = json.loads(out)
    print([(phase["name"], phase["plan"], phase["step_time_s"]) for phase in summary["phases"]])
    assert summary["max_loss_difference"] < 1e-5
    assert summary["replanned_step_time_s"] < 0.7 * summary["straggling_step_time_s"]
    last = summary["phases"][-1]
    assert last["plan"] == summary["plan_before"]
    assert last["step_time_s"] == pytest.approx(summary["healthy_step_time_s"], rel=0.05)
    assert (tmp_path / "report.html").exists()
