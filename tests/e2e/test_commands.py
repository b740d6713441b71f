"""The commands that a newcomer runs first, as he runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def malleus(
    *words: str, timeout_s: float = 100.0, module: str = "malleus_megatron.cli.main"
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_doctor_finds_every_seam_in_place() -> None:
    status, out, err = malleus("doctor", "--json")
    assert status == 0, out + err
    document = json.loads(out)
    seams = [finding for finding in document["findings"] if finding["what"].startswith("seam ")]
    assert len(seams) >= 9
    (sources,) = (f for f in document["findings"] if f["what"] == "Megatron's sources")
    assert sources["detail"].startswith("as released")
    assert all(finding["ok"] for finding in document["findings"])


def test_the_doctor_refuses_a_megatron_with_another_signature(tmp_path: Path) -> None:
    """A stand-in for a later Megatron, whose train_step has one argument more."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'doctor' in sys.argv:\n"
        "    from megatron.training import training\n"
        "    original = training.train_step\n"
        "    def train_step(forward_step_func, extra):\n"
        "        return original(forward_step_func)\n"
        "    training.train_step = train_step\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "malleus_megatron.cli.main", "doctor"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    refused = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(refused) == 1
    assert "expected (forward_step_func, data_iterator" in refused[0]
    assert "found (forward_step_func, extra)" in refused[0]


@pytest.mark.timeout(600)
def test_the_demo_shows_a_replan(tmp_path: Path) -> None:
    """Times on a busy machine are not held here; rates, counts and losses are."""
    words = ("demo", "--json", "--out", str(tmp_path / "out"))
    status, out, err = malleus(*words, timeout_s=580, module="tests.e2e.short_demo")
    assert status == 0, err
    summary: dict[str, Any] = json.loads(out)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert (tmp_path / "out" / "events.jsonl").exists()
    assert summary["measured_rates"]["0"] == pytest.approx(3.0, rel=0.1)
    assert sum(summary["micro_batches_after"]) == sum(summary["micro_batches_before"])
    assert summary["plan_after"] != summary["plan_before"]
    assert summary["migrated_bytes"] > 0
    first = tmp_path / "out" / "plans" / "generation-1.json"
    plan = json.loads(first.read_text(encoding="utf-8"))
    of_the_slow_gpu = [
        stage["layers"][1] - stage["layers"][0]
        for pipeline in plan["pipelines"]
        for stage in pipeline["stages"]
        if 0 in stage["gpus"]
    ]
    assert sum(of_the_slow_gpu) < 4
    assert summary["max_loss_difference"] < 1e-5
    assert summary["replanned_step_time_s"] < 0.8 * summary["straggling_step_time_s"]
    assert "report.html" in {path.name for path in (tmp_path / "out").iterdir()}
