"""Reading a job's folder: events.jsonl, line by line, and the plans beside it."""

import json
from dataclasses import dataclass
from pathlib import Path

from malleus_megatron.errors import BadInputError
from malleus_megatron.pages.history import History, begins_a_run
from malleus_megatron.plan.codec import plan_id, read_plan
from malleus_megatron.plan.fields import as_dict
from malleus_megatron.plan.plan import Plan

_MOST_NOTES = 5
_LONGEST_LINE = 2**20
"""Bytes; no event is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A folder's runs, and what of it could not be read."""

    runs: tuple[History, ...]
    notes: tuple[str, ...] = ()


def read_log(folder: Path) -> Log:
    """Read FOLDER/events.jsonl. Lines that are no event are left out and told.

    Jobs append, so a file may hold several runs: one begins with a `level` event of iteration 0,
    and where iterations go back.

    Raises:
        BadInputError: there is no such file, it cannot be read, or it holds no event at all.
    """
    path = folder / "events.jsonl"
    runs: list[History] = []
    bad: list[str] = []
    num_lines = 0
    try:
        with path.open("rb") as file:
            for num_lines, line in enumerate(file, start=1):
                problem = _take(line, runs)
                if problem:
                    bad.append(f"line {num_lines}: {problem}")
    except OSError as error:
        raise BadInputError(
            f"{path}: {error.strerror or error}. A job writes it with --malleus-log-dir; name "
            "that folder."
        ) from error
    if not runs:
        raise BadInputError(
            f"{path} holds no event in {num_lines} lines"
            + (f" ({bad[0]})" if bad else "")
            + ". Has the job started, and is this its --malleus-log-dir?"
        )
    more = len(bad) - _MOST_NOTES
    notes = [*bad[:_MOST_NOTES], *([f"{more} more lines could not be read"] if more > 0 else [])]
    return Log(runs=tuple(runs), notes=tuple(notes))


def plans_of(folder: Path, run: History) -> dict[int, Plan]:
    """The run's plans by generation, as far as their files are still those of this run.

    Another run in the same folder writes over them; a plan whose hash is not the one in the
    events is not this run's.
    """
    hashes = {
        generation: event.text("plan")
        for event in run.of_kind("plan", "level")
        if (generation := event.integer("generation")) is not None
    } | {step.generation: step.plan_id for step in run.steps}
    plans = {}
    for generation, identity in sorted(hashes.items()):
        try:
            plan = read_plan(folder / "plans" / f"generation-{generation}.json")
        except BadInputError:  # never written, or not whole: the page says that it is not there
            continue
        if plan_id(plan) == identity:
            plans[generation] = plan
    return plans


def _take(line: bytes, runs: list[History]) -> str | None:
    """Add a line's event to its run; what is wrong with it, if anything is."""
    if not line.strip():
        return None
    if len(line) > _LONGEST_LINE:
        return f"{len(line)} bytes; at most {_LONGEST_LINE} are read"
    try:
        body = as_dict(json.loads(line), "the line")
        if not runs or begins_a_run(body, runs[-1]):
            run = History()
            run.add(body)
            runs.append(run)
        else:
            runs[-1].add(body)
    except (ValueError, RecursionError):
        return "cut off" if not line.endswith(b"\n") else "no JSON"
    except BadInputError as error:
        return str(error)
    return None
