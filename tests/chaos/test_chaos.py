"""A short job of chaos, and that its judge finds what it is there to find."""

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.config import Level
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_from_json
from malleus_megatron.plan.degrees import ModelWidths
from tests.chaos.__main__ import GRIDS
from tests.chaos.run import run, train_stock
from tests.chaos.script import (
    ANSWER_FAULTS,
    FAILING_SWITCH,
    LOG_FAULTS,
    OFFERS,
    PLAN_FAULTS,
    SIDECAR_FAULTS,
    SILENT,
    Fault,
    Script,
    draw,
)
from tests.chaos.verdict import LEAST, Warned, judge, too_little, unexplained
from tests.harness.training import Grid

GRID, GRID_OF_8 = GRIDS[4], GRIDS[8]
ITERATIONS = 40
SEED = 4
LIMIT_S = 600.0


@pytest.mark.e2e
@pytest.mark.timeout(LIMIT_S)
def test_a_short_job_of_chaos(tmp_path: Path) -> None:
    script = draw(SEED, GRID, ITERATIONS)
    verdict = run(script, tmp_path, train_stock(GRID, tmp_path, ITERATIONS))
    print(verdict.line())
    assert not verdict.problems
    assert {name for name, count in verdict.counts.items() if count} >= {
        "plans",
        "migrations",
        "refusals",
        "failed switches",
        "restarts",
    }


def test_the_same_seed_draws_the_same_script() -> None:
    assert draw(3, GRID, 200) == draw(3, GRID, 200)
    assert draw(3, GRID, 200) != draw(4, GRID, 200)


def test_twenty_seeds_draw_every_kind_of_fault() -> None:
    scripts = [draw(seed, GRID_OF_8, 200) for seed in range(20)]
    drawn = {fault.kind for script in scripts for fault in script.faults}
    known = {*ANSWER_FAULTS, *LOG_FAULTS, *PLAN_FAULTS, *SIDECAR_FAULTS, *SILENT, FAILING_SWITCH}
    assert drawn == known
    assert {script.own_sidecar for script in scripts} == {True, False}
    assert max(entry["rate"] for script in scripts for entry in script.injection) >= 100


KILLS = [Fault(kind="kill", iteration=5), Fault(kind="kill", iteration=20)]
ENDED = "The sidecar has ended (SIGKILL). Training goes on; it is started again (1 of 3)."
SLOW_MACHINE = "The pace is not held: 30 of 100 layer calls took longer than it allows."


@pytest.mark.parametrize(
    ("warnings", "num_problems"),
    [
        ([], 0),
        ([(ENDED, 5)], 0),
        ([(ENDED, 4)], 0),  # killed while iteration 5 ran
        ([(ENDED, 3)], 0),  # killed before rank 0 has told the end of iteration 4
        ([(ENDED, 2)], 1),
        ([(ENDED, 6), (ENDED, 7)], 1),
        ([(ENDED, 6), (ENDED, 30)], 0),
        ([(ENDED, 6), (ENDED, 30), (ENDED, 31)], 1),
        ([("Something else.", 30)], 1),
        ([(SLOW_MACHINE, 2)], 0),
        ([(SLOW_MACHINE, 2), (SLOW_MACHINE, 3)], 1),
    ],
)
def test_a_fault_explains_one_warning(warnings: list[tuple[str, int]], num_problems: int) -> None:
    warned = [Warned(text=text, iteration=iteration) for text, iteration in warnings]
    assert len(unexplained(warned, KILLS, own_sidecar=True)) == num_problems


def test_what_is_silent_explains_nothing() -> None:
    warned = [Warned(text="A plan was not taken: why", iteration=math.inf)]
    for kind in SILENT:
        faults = [Fault(kind=kind, iteration=1)]
        assert len(unexplained(warned, faults, own_sidecar=True)) == 1


def job(folder: Path, losses: Sequence[float], events: Sequence[dict[str, Any]] = ()) -> Path:
    """What a job leaves, and in `stock.jsonl` the losses that it should have had."""
    (folder / "log").mkdir(exist_ok=True)
    _write(folder / "log" / "events.jsonl", events)
    for name, values in (("losses", losses), ("stock", [5.5, 5.25, 5.0])):
        steps = [{"iteration": k + 1, "loss": v, "grad_norm": 1.0} for k, v in enumerate(values)]
        _write(folder / f"{name}.jsonl", steps)
    return folder


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


SCRIPT: Script = dataclasses.replace(draw(0, GRID, 40), iterations=3, faults=[])


def problems(folder: Path, *outputs: str) -> list[str]:
    return judge(SCRIPT, folder, folder / "stock.jsonl", outputs or ("", "")).problems


def test_a_job_that_is_well(tmp_path: Path) -> None:
    assert problems(job(tmp_path, [5.5, 5.25, 5.000001])) == []


@pytest.mark.parametrize("losses", [[5.5, 5.25, 5.00001], [5.5, math.nan, 5.0]])
def test_a_wrong_loss_is_found(tmp_path: Path, losses: list[float]) -> None:
    (problem,) = problems(job(tmp_path, losses))
    assert "loss" in problem


def test_a_job_that_ends_too_soon_is_found(tmp_path: Path) -> None:
    (problem,) = problems(job(tmp_path, [5.5, 5.25]))
    assert "2 iterations are recorded, 3 in stock" in problem


@pytest.mark.parametrize(
    "output",
    ["Traceback (most recent call last):\n", "malleus: warning: alone\n"],
)
def test_other_ranks_are_quiet(tmp_path: Path, output: str) -> None:
    assert len(problems(job(tmp_path, [5.5, 5.25, 5.0]), "", output)) == 1


def test_a_warning_that_is_not_in_the_events_is_found(tmp_path: Path) -> None:
    machine = f"malleus: warning: {SLOW_MACHINE}\n"
    (problem,) = problems(job(tmp_path, [5.5, 5.25, 5.0]), machine, "")
    assert "1 warnings in the log, 0 in the events" in problem
    event = {"event": "warning", "iteration": 2, "message": SLOW_MACHINE}
    assert problems(job(tmp_path, [5.5, 5.25, 5.0], [event]), machine, "") == []


def test_after_a_gap_the_events_go_on_with_later_warnings(tmp_path: Path) -> None:
    first, last = "The sidecar failed: why", f"{SLOW_MACHINE} again"
    full = "Events are no longer written to log: full. Training goes on."
    output = "".join(f"malleus: warning: {text}\n" for text in (full, first, last))
    event = {"event": "warning", "iteration": 2, "message": last}
    script = dataclasses.replace(SCRIPT, faults=[Fault(kind="log is full", iteration=1)])
    folder = job(tmp_path, [5.5, 5.25, 5.0], [event])
    found = judge(script, folder, folder / "stock.jsonl", (output, "")).problems
    assert found == [f"no fault left for the warning after inf: {first}"]


def test_a_test_in_which_nothing_happens_fails() -> None:
    assert len(too_little({}, 200)) == len(LEAST)
    assert too_little(dict.fromkeys(LEAST, 3), 200) == []
    assert too_little(dict.fromkeys(LEAST, 3), 4000) != []


@pytest.mark.parametrize("kind", [kind for kind in OFFERS if kind != "too many pipelines"])
@pytest.mark.parametrize("grid", [GRID, GRID_OF_8])
def test_an_invalid_offer_is_no_plan_of_the_job(grid: Grid, kind: str) -> None:
    nominal = plan_from_json(grid.plan([2, 2]))
    widths = ModelWidths(
        num_attention_heads=4, num_query_groups=4, ffn_hidden_size=128, padded_vocab_size=128
    )
    with pytest.raises(BadInputError):
        offer = plan_from_json(OFFERS[kind](random.Random(0), grid))
        CurrentPlan(nominal, Level.reshape, widths).check(offer)


def test_a_step_has_fewer_micro_batches_than_too_many_pipelines() -> None:
    offer = plan_from_json(OFFERS["too many pipelines"](random.Random(0), GRID_OF_8))
    assert len(offer.pipelines) > GRID_OF_8.num_microbatches
