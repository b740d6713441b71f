"""Rows to a trace: steps of which every operation was recorded once stay, others are named."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.operations import Operation
from malleus_megatron.whatif.rows import Flags, Ints, Rows
from malleus_megatron.whatif.trace import SkippedStep, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """Which operation each row is and in which step and pipeline it ran."""

    steps: Ints
    """The different steps, ascending."""
    step: Ints
    """Of each row: index into `steps`."""
    num_pipelines: int
    known_pipeline: Flags
    """Of each row: whether most steps have its pipeline."""
    operations: tuple[Operation, ...]
    operation: Ints
    """Of each row: index into `operations`."""
    expected: Flags
    """Of each operation: whether at least half of all steps and pipelines have it."""


def complete_steps(rows: Rows) -> Trace:
    """Keep the steps in which every worker has exactly the operations that it usually has.

    Raises:
        BadInputError: no step is complete, or a whole pipeline is missing.
    """
    cells = _cells(rows)
    faults = _faults(rows, cells)
    whole = np.array([index not in faults for index in range(len(cells.steps))])
    skipped = tuple(
        SkippedStep(step=int(cells.steps[index]), reason=faults[index]) for index in sorted(faults)
    )
    if not whole.any():
        raise BadInputError(
            f"none of its {len(skipped)} steps is complete; step {skipped[0].step}: "
            f"{skipped[0].reason}."
        )
    kept = whole[cells.step]
    position = np.cumsum(cells.expected) - 1
    where = (
        position[cells.operation[kept]],
        (np.cumsum(whole) - 1)[cells.step[kept]],
        rows.dp_rank[kept],
    )
    shape = (int(cells.expected.sum()), int(whole.sum()), cells.num_pipelines)
    start_s, duration_s = np.zeros(shape), np.zeros(shape)
    start_s[where] = rows.start_s[kept]
    duration_s[where] = rows.duration_s[kept]
    start_s -= start_s.min(axis=(0, 2), keepdims=True)
    return Trace(
        operations=tuple(
            operation
            for operation, expected in zip(cells.operations, cells.expected, strict=True)
            if expected
        ),
        steps=tuple(int(step) for step in cells.steps[whole]),
        num_pipelines=cells.num_pipelines,
        start_s=start_s,
        duration_s=duration_s,
        skipped=skipped,
    )


def _cells(rows: Rows) -> _Cells:
    steps, step = np.unique(rows.step, return_inverse=True)
    num_pipelines, known = _pipelines(rows.dp_rank, step, len(steps))
    keys, operation = np.unique(_combined(rows.stage, rows.kind, rows.number), return_inverse=True)
    first = np.zeros(len(keys), dtype=np.int64)
    first[operation] = np.arange(len(operation))
    cell = step * num_pipelines + np.where(known, rows.dp_rank, 0)
    places = np.unique(np.where(known, operation * (len(steps) * num_pipelines) + cell, -1))
    counts = np.bincount(places[places >= 0] // (len(steps) * num_pipelines), minlength=len(keys))
    return _Cells(
        steps=steps,
        step=step,
        num_pipelines=num_pipelines,
        known_pipeline=known,
        operations=tuple(
            Operation(int(stage), rows.kinds[kind], int(number))
            for stage, kind, number in zip(
                rows.stage[first], rows.kind[first], rows.number[first], strict=True
            )
        ),
        operation=operation,
        expected=2 * counts >= len(steps) * num_pipelines,
    )


def _pipelines(dp_rank: Ints, step: Ints, num_steps: int) -> tuple[int, Flags]:
    """How many pipelines there are, and which rows are of one of them.

    Raises:
        BadInputError: a data-parallel rank is missing among those that most steps have.
    """
    ranks, rank = np.unique(dp_rank, return_inverse=True)
    pairs = np.unique(rank * num_steps + step)
    usual = 2 * np.bincount(pairs // num_steps, minlength=len(ranks)) >= num_steps
    found = [int(value) for value in ranks[usual]]
    absent = next((place for place, value in enumerate(found) if place != value), len(found))
    if not found or absent < len(found):
        raise BadInputError(f"dp_rank {absent} is missing in most steps; ranks count from 0.")
    return len(found), usual[rank]


def _combined(*columns: Ints) -> Ints:
    """One number for each different tuple of values, in their order."""
    combined = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        _, combined = np.unique(combined * len(values) + index, return_inverse=True)
    return combined


def _faults(rows: Rows, cells: _Cells) -> dict[int, str]:
    """What is wrong with each step that is not complete: index of the step -> reason."""
    wrong_number = ~(
        np.isfinite(rows.start_s) & (rows.duration_s >= 0) & (rows.duration_s < np.inf)
    )
    unusual = ~cells.known_pipeline | ~cells.expected[cells.operation]
    twice = _repeated(cells.operation, cells.step, rows.dp_rank)
    missing = _missing(rows.dp_rank, cells, ~unusual)
    reasons: dict[int, str] = {}
    for flags, what in (
        (wrong_number, "start or duration is no time"),
        (twice, "is recorded twice"),
        (unusual, "is not in most other steps"),
    ):
        for index, row in _first_in_step(flags, cells.step):
            worker = f"{cells.operations[cells.operation[row]]}, dp rank {rows.dp_rank[row]}"
            reasons.setdefault(index, f"{worker}: {what}")
    for index, absent in missing.items():
        reasons.setdefault(index, absent)
    return reasons


def _first_in_step(flags: Flags, step: Ints) -> Sequence[tuple[int, int]]:
    """(step, first row with the flag) of each step that has one."""
    rows = np.flatnonzero(flags)
    steps, first = np.unique(step[rows], return_index=True)
    return [(int(index), int(rows[row])) for index, row in zip(steps, first, strict=True)]


def _repeated(operation: Ints, step: Ints, dp_rank: Ints) -> Flags:
    """Rows of an operation, step and pipeline of which there is more than one."""
    place = _combined(operation, step, dp_rank)
    return np.bincount(place)[place] > 1


def _missing(dp_rank: Ints, cells: _Cells, usual: Flags) -> dict[int, str]:
    """Of each step that lacks operations: how many, and the first."""
    wanted = np.flatnonzero(cells.expected)
    per_step = len(wanted) * cells.num_pipelines
    width = len(cells.operations) * cells.num_pipelines
    place = cells.operation * cells.num_pipelines + np.where(usual, dp_rank, 0)
    places = np.unique((cells.step * width + place)[usual])
    counts = np.bincount(places // width, minlength=len(cells.steps))
    all_places = (wanted[:, None] * cells.num_pipelines + np.arange(cells.num_pipelines)).ravel()
    reasons = {}
    for index in np.flatnonzero(counts < per_step):
        there = places[places // width == index] % width
        absent = np.setdiff1d(all_places, there)
        operation = cells.operations[absent[0] // cells.num_pipelines]
        reasons[int(index)] = (
            f"{len(absent)} of {per_step} operations are missing, first {operation}, "
            f"dp rank {absent[0] % cells.num_pipelines}"
        )
    return reasons
