"""The figures that the demo draws from what its two jobs wrote."""

from typing import Any

import pytest

from malleus_megatron.cli.demo import INJECTED_FROM, SETTLING, summarise, table
from malleus_megatron.errors import MalleusError

REPLAN = INJECTED_FROM + 4


def step(iteration: int, seconds: float, loss: float) -> dict[str, Any]:
    return {"event": "iteration", "iteration": iteration, "step_time_s": seconds, "loss": loss}


def events() -> list[dict[str, Any]]:
    written = [step(1, 9.0, 5.0)]
    written += [step(i, 1.0, 5.0) for i in range(2, INJECTED_FROM)]
    written += [step(i, 3.0, 5.0) for i in range(INJECTED_FROM, REPLAN)]
    written.append({"event": "rates", "iteration": REPLAN - 1, "rates": {"0": 3.02}})
    written.append(
        {
            "event": "plan",
            "iteration": REPLAN,
            "micro_batches": [8],
            "layout": "8 x (1:3 | 2-3:5), standby 0",
            "predicted": {"step_time_s": 1.5},
        }
    )
    written.append({"event": "migration", "iteration": REPLAN, "bytes": 3 * 2**20, "seconds": 0.5})
    written += [step(REPLAN, 8.0, 5.0), step(REPLAN + 1, 7.0, 5.0)]
    written += [step(i, 1.6, 5.0) for i in range(REPLAN + SETTLING, 24)]
    return written


def stock() -> list[dict[str, Any]]:
    return [{"iteration": i, "loss": 5.0 + 1e-7 * i} for i in range(1, 24)]


def test_each_situation_has_its_own_steps() -> None:
    summary = summarise(events(), stock())
    assert summary["healthy_step_time_s"] == 1.0
    assert summary["straggling_step_time_s"] == 3.0
    assert summary["replanned_step_time_s"] == 1.6
    assert summary["micro_batches_before"] == [8]
    assert summary["micro_batches_after"] == [8]
    assert summary["plan_after"] == "8 x (1:3 | 2-3:5), standby 0"
    assert summary["migrated_bytes"] == 3 * 2**20
    assert summary["migration_s"] == 0.5
    assert summary["measured_rates"] == {"0": 3.02}
    assert summary["injected"] == {"0": 3.0}
    assert summary["iterations_until_replan"] == 4
    assert summary["max_loss_difference"] == pytest.approx(23e-7)


def test_a_job_without_a_replan_is_an_error() -> None:
    without = [event for event in events() if event["event"] != "plan"]
    with pytest.raises(MalleusError, match="without a re-plan"):
        summarise(without, stock())


def test_a_job_that_was_not_recorded_whole_is_an_error() -> None:
    with pytest.raises(MalleusError, match="iteration 23"):
        summarise(events(), stock()[:-1])


def test_the_table_says_that_the_run_is_paced() -> None:
    text = table(summarise(events(), stock()))
    assert "paced" in text
    assert "8 x (1:3 | 2-3:5), standby 0" in text
    assert "1.60 s" in text
