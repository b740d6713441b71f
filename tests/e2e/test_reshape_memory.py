"""A switch stays within a bound on memory: both states whole, or old state leaves on the way."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.plans import plan_of
from tests.harness.recipes import BF16, CLIPPED, LLAMA, Recipe
from tests.harness.reshaping import events_of, nominal_of, run_job, train_stock
from tests.harness.training import Grid, assert_same_training

pytestmark = pytest.mark.e2e

RANKS = range(4)
MIB = 2**20
ONE_WAY_MIB = 3
"""Enough for the way into plan B, and not for the way back."""
GRID = Grid(pipelines=2, stages=2, num_microbatches=4)
B = plan_of((4, [((0, 3), 3), ((1,), 1)]), standby=(2,))
C = plan_of((1, [((3,), 4)]), (3, [((2,), 1), ((0, 1), 3)]))


def wide(flags: str) -> Recipe:
    """So wide that state, 16 MiB in all, outweighs what else is in memory."""
    return Recipe(name="wide", grid=GRID, flags=f"{LLAMA} {CLIPPED} {flags} --hidden-size 128")


def bounded(bound_mib: int, tour_at: int = 3) -> dict[str, Any]:
    """Shares are cut so finely that some leave before others come."""
    env = {"TOUR_AT": tour_at, "CHECK_AT": "5,6", "BUFFER_BYTES": MIB // 4, "ROUND_BYTES": 64 * MIB}
    return {
        "flags": ["--malleus-migration-memory", str(bound_mib)],
        "env": {name: str(value) for name, value in env.items()},
    }


def logs_of(folder: Path) -> list[Any]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in RANKS]


@pytest.mark.parametrize(
    ("flags", "bound_mib", "ways"),
    [
        (BF16, 4, {True}),
        (BF16, 5, {True, False}),
        (BF16, 16, {False}),
        ("--use-distributed-optimizer", 5, {True}),
    ],
)
def test_a_switch_stays_within_its_bound_and_loses_no_bit(
    flags: str, bound_mib: int, ways: set[bool], tmp_path: Path
) -> None:
    """Old state leaves where the bound is tight, for some switches, for none."""
    at = {4: ("B", B), 5: ("C", C), 6: ("nominal", nominal_of(GRID))}
    recipe = wide(flags)
    record = run_job("there_and_back", recipe, tmp_path, at, iterations=6, **bounded(bound_mib))
    for rank, report in enumerate(logs_of(tmp_path)):
        assert report["disputed"] == {"5": [], "6": []}
        assert {move["gave_back"] for move in report["tour"]["moves"]} == ways
        for move in report["tour"]["moves"]:
            assert (move["differing"], move["lost"], move["disputed"]) == ([], [], [])
            assert move["alive"] == [], f"rank {rank}, to {move['to']}"
            assert move["received"] == move["missing"]
            assert 0 < move["extra_bytes"] <= bound_mib * MIB, f"to {move['to']}"
    assert events_of(tmp_path, "warning") == []
    assert {event["gave_back"] for event in events_of(tmp_path, "migration")} <= ways
    if "bf16" not in flags:
        stock = train_stock(recipe, tmp_path, iterations=6)
        assert_same_training(record, stock, relative=1e-6)


def test_a_bound_that_is_too_low_is_refused_before_anything_changes(tmp_path: Path) -> None:
    at = dict.fromkeys((2, 3), ("plan", B))
    # The tour's iteration never comes.
    run_job("there_and_back", wide(BF16), tmp_path, at, iterations=3, **bounded(1, tour_at=9))
    messages = [event["message"] for event in events_of(tmp_path, "warning")]
    assert len(messages) == 2
    assert "MiB to give the old one back on the way" in messages[0]
    assert "--malleus-migration-memory allows 1 MiB" in messages[0]
    assert events_of(tmp_path, "plan") == events_of(tmp_path, "migration") == []
    assert [event["generation"] for event in events_of(tmp_path, "iteration")] == [0, 0, 0]


def test_a_plan_that_could_not_be_left_within_the_bound_is_declined(tmp_path: Path) -> None:
    """The recipe's own optimizer is built with all of its state: the way back takes more."""
    settings = bounded(ONE_WAY_MIB, tour_at=9)
    settings["flags"] += ["--eval-iters", "1", "--split", "90,10,0"]
    run_job("there_and_back", wide(BF16), tmp_path, {2: ("plan", B)}, iterations=3, **settings)
    (message,) = [event["message"] for event in events_of(tmp_path, "warning")]
    assert "from it there is no way back to the recipe's plan: " in message
    assert f"--malleus-migration-memory allows {ONE_WAY_MIB} MiB. Give it as much" in message
    assert events_of(tmp_path, "plan") == events_of(tmp_path, "migration") == []
    assert [event["generation"] for event in events_of(tmp_path, "iteration")] == [0, 0, 0]


def test_once_old_state_has_left_a_failure_ends_the_job_on_all_ranks(tmp_path: Path) -> None:
    """Every third step fails once, and changes nothing; the first that is final ends it."""
    at = dict.fromkeys(range(2, 40), ("plan", B))
    settings = bounded(ONE_WAY_MIB + 1)
    settings["env"]["STRIDE"] = "3"
    run_job("failing_migration", wide(BF16), tmp_path, at, iterations=40, expect_exit=2, **settings)
    logs = logs_of(tmp_path)
    steps = logs[0][-1]["steps"]
    assert "giving back old state" in steps
    assert "giving back old state" not in logs[0][-2]["steps"]
    assert len([step for step in steps if step.startswith("unpacking round")]) >= 2
    for log in logs:
        assert log[-1]["steps"] == steps
        assert f"{steps[-1]} failed on rank" in log[-1]["error"]
        assert "restart it from its last checkpoint" in log[-1]["error"]
        # Two special faults come first.
        assert len(log) == 2 + len(steps[::3])
        for attempt in log[:-1]:
            assert attempt["error"] is not None
            assert (attempt["changed"], attempt["gradients"]) == ([], [])
            assert attempt["left_over"] == 0
    assert events_of(tmp_path, "migration") == []
