"""Traces of real jobs, whose answers were published with them."""

from pathlib import Path

import pytest

from malleus_megatron.whatif.analysis import Analysis, analyse
from malleus_megatron.whatif.trace_file import read_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def analysed(name: str) -> Analysis:
    path = TRACES / name
    if not path.exists():
        pytest.skip(
            f"{name} is not beside this checkout; it is in the artifact of arXiv 2505.05713"
        )
    return analyse(read_trace(path))


def test_a_job_with_one_slow_gpu_has_the_published_answer() -> None:
    found = analysed("trace-AR.parquet")
    assert found.what_if.step_time_s == pytest.approx(46.336, rel=1e-3)
    assert found.what_if.ideal_step_time_s == pytest.approx(23.485, rel=1e-3)
    assert found.what_if.slowdown == pytest.approx(1.9730, rel=1e-3)
    assert found.by_dp_rank == pytest.approx((1.9730, 1.0109, 1.0112, 1.0111), rel=1e-3)
    assert found.by_stage == pytest.approx((1.9792, 0.9971, 0.9956, 1.0024), rel=1e-3)
    assert found.m_w == pytest.approx(1.0017, abs=1e-3)
    assert found.m_s == pytest.approx(-0.0012, abs=1e-3)
    assert [(s.dp_rank, s.stage) for s in found.stragglers] == [(0, 0)]
    assert found.stragglers[0].rate == pytest.approx(2.35, abs=0.02)
    assert found.diagnosis.startswith("A slow GPU: worker (dp 0, stage 0)")


def test_a_job_with_a_heavy_last_stage_has_the_published_answer() -> None:
    found = analysed("trace-ST.parquet")
    assert found.what_if.step_time_s == pytest.approx(2.1727, rel=1e-3)
    assert found.what_if.ideal_step_time_s == pytest.approx(1.8433, rel=1e-3)
    assert found.what_if.slowdown == pytest.approx(1.1787, rel=1e-3)
    assert found.by_stage[3] == pytest.approx(1.2323, rel=1e-3)
    assert found.by_operation["forward-compute"] == pytest.approx(1.0875, rel=1e-3)
    assert found.by_operation["backward-compute"] == pytest.approx(1.0742, rel=1e-3)
    assert found.m_s == pytest.approx(1.219, abs=2e-3)
    assert found.m_w == pytest.approx(0.031, abs=2e-3)
    assert not found.stragglers
    assert found.diagnosis.startswith("The last stage (stage 3) is too heavy")
