"""The figures that the demo draws from what its two jobs wrote."""

from typing import Any

import pytest

from malleus_megatron.cli.demo import SCRIPT
from malleus_megatron.cli.demo_summary import SETTLING, Change, Script, summarise, table
from malleus_megatron.errors import MalleusError

SHORT = Script(
    changes=(
        Change(iteration=6, name="GPU 0 slow", rates={0: 3.0}),
        Change(iteration=16, name="GPU 2 slow too", rates={0: 3.0, 2: 4.0}),
        Change(iteration=26, name="healthy again", rates={}),
    ),
    plan="8 x (0-1:4 | 2-3:4)",
    micro_batches=(8,),
    num_iterations=39,
)
REPLANS = (10, 21, 34)
LAYOUTS = ("8 x (1:3 | 2-3:5), standby 0", "8 x (1:4 | 3:4), standby 0 2", SHORT.plan)
OLD_S, NEW_S = (3.0, 4.0, 2.0), (1.5, 2.0, 1.0)


def step(iteration: int, seconds: float) -> dict[str, Any]:
    return {"event": "iteration", "iteration": iteration, "step_time_s": seconds, "loss": 5.0}


def events() -> list[dict[str, Any]]:
    written = [step(1, 9.0), *(step(i, 1.0) for i in range(2, 6))]
    ends = (16, 26, 40)
    for number, (change, replan) in enumerate(zip(SHORT.changes, REPLANS, strict=True)):
        written += [step(i, OLD_S[number]) for i in range(change.iteration, replan)]
        rates = {str(gpu): rate + 0.02 for gpu, rate in change.rates.items()}
        written.append({"event": "rates", "iteration": replan - 1, "rates": rates})
        written.append(
            {
                "event": "plan",
                "iteration": replan,
                "micro_batches": [8],
                "layout": LAYOUTS[number],
                "predicted": {"step_time_s": NEW_S[number]},
            }
        )
        moved = {"event": "migration", "iteration": replan, "bytes": 2**20, "seconds": 0.5}
        written.append(moved)
        written += [step(i, 8.0) for i in range(replan, replan + SETTLING)]
        written += [step(i, NEW_S[number]) for i in range(replan + SETTLING, ends[number])]
    return written


def stock() -> list[dict[str, Any]]:
    return [{"iteration": i, "loss": 5.0 + 1e-7 * i} for i in range(1, 40)]


def test_each_phase_has_its_own_steps() -> None:
    summary = summarise(SHORT, events(), stock())
    phases = summary["phases"]
    assert [phase["step_time_s"] for phase in phases] == [1.0, 3.0, 1.5, 4.0, 2.0, 2.0, 1.0]
    assert [phase["plan"] for phase in phases] == [
        SHORT.plan,
        *(SHORT.plan, LAYOUTS[0]),
        *(LAYOUTS[0], LAYOUTS[1]),
        *(LAYOUTS[1], SHORT.plan),
    ]
    assert summary["healthy_step_time_s"] == 1.0
    assert summary["straggling_step_time_s"] == 3.0
    assert summary["replanned_step_time_s"] == 1.5
    assert summary["predicted_step_time_s"] == 1.5
    assert summary["plan_after"] == LAYOUTS[0]
    assert summary["migrated_bytes"] == 3 * 2**20
    assert summary["migration_s"] == 1.5
    assert summary["measured_rates"] == {"0": 3.02}
    assert summary["injected"] == {"0": 3.0}
    assert summary["iterations_until_replan"] == 4
    assert summary["max_loss_difference"] == pytest.approx(39e-7)


@pytest.mark.parametrize("missing", REPLANS)
def test_a_change_without_a_replan_is_an_error(missing: int) -> None:
    without = [e for e in events() if (e["event"], e["iteration"]) != ("plan", missing)]
    with pytest.raises(MalleusError, match="without a re-plan"):
        summarise(SHORT, without, stock())


def test_a_job_that_was_not_recorded_whole_is_an_error() -> None:
    with pytest.raises(MalleusError, match="iteration 39"):
        summarise(SHORT, events(), stock()[:-1])


def test_the_table_says_that_the_run_is_paced() -> None:
    text = table(summarise(SHORT, events(), stock()))
    assert "paced" in text
    assert LAYOUTS[1] in text
    assert "1.50 s" in text


def test_rates_hold_until_the_next_change() -> None:
    assert SHORT.injection() == [
        {"gpu": 0, "rate": 3.0, "from_iteration": 6, "to_iteration": 16},
        {"gpu": 0, "rate": 3.0, "from_iteration": 16, "to_iteration": 26},
        {"gpu": 2, "rate": 4.0, "from_iteration": 16, "to_iteration": 26},
    ]
    iterations = [change.iteration for change in SCRIPT.changes]
    assert iterations == sorted(iterations)
    assert SCRIPT.changes[-1].rates == {}
