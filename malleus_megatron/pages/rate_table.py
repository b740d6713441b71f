"""Rates over time as a table that a screen can hold: spans of iterations, GPUs or groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.pages.history import History, RatesSince
from malleus_megatron.plan.rates import HEALTHY
from malleus_megatron.plan.render import gpu_ranges

MOST_SPANS = 240
MOST_ROWS = 48
"""A job of more GPUs is shown in groups, below the GPUs that were slowest."""
MOST_ALONE = 16
_STANDS_OUT = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRow:
    """A GPU, or the slowest of several."""

    gpus: tuple[int, ...]
    rates: tuple[float | None, ...]
    """The highest in each span; None where nothing was measured."""

    @property
    def name(self) -> str:
        """As it stands beside the row."""
        return f"GPU {gpu_ranges(self.gpus)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTable:
    """Rows of rates; span i has the iterations from `starts[i]` to before the next."""

    starts: tuple[int, ...]
    end: int
    """The first iteration after the last span."""
    rows: tuple[RateRow, ...] = ()
    groups: tuple[RateRow, ...] = ()
    """All GPUs, several a row; empty where `rows` has all of them."""


def rate_table(history: History) -> RateTable | None:
    """The rates that held in each span of the run; None: none were told."""
    if not history.rates or not history.steps:
        return None
    first = min(history.steps[0].iteration, history.rates[0].iteration)
    last = max(history.last_iteration, history.rates[-1].iteration)
    width = max(1, math.ceil((last - first + 1) / MOST_SPANS))
    starts = tuple(range(first, last + 1, width))
    columns = [
        _highest(in_force, history.num_gpus)
        for in_force in _in_force(list(history.rates), starts, width)
    ]
    gpus = range(history.num_gpus)
    if len(gpus) <= MOST_ROWS:
        rows, groups = [_row(columns, (gpu,)) for gpu in gpus], []
    else:
        size = 2 ** math.ceil(math.log2(len(gpus) / (MOST_ROWS - MOST_ALONE)))
        rows = [_row(columns, (gpu,)) for gpu in _slowest(columns, gpus)]
        groups = [
            _row(columns, tuple(range(start, min(start + size, len(gpus)))))
            for start in range(0, len(gpus), size)
        ]
    return RateTable(starts=starts, end=last + 1, rows=tuple(rows), groups=tuple(groups))


def _in_force(
    rates: Sequence[RatesSince], starts: Sequence[int], width: int
) -> list[list[RatesSince]]:
    """For each span the rates that held in some iteration of it."""
    spans: list[list[RatesSince]] = []
    held: RatesSince | None = None
    at = 0
    for start in starts:
        span = [] if held is None else [held]
        while at < len(rates) and rates[at].iteration < start + width:
            held = rates[at]
            if held.iteration <= start:
                span.clear()
            span.append(held)
            at += 1
        spans.append(span)
    return spans


def _highest(in_force: Sequence[RatesSince], num_gpus: int) -> list[float]:
    """By GPU; NaN where nothing is known."""
    highest = [math.nan] * num_gpus
    for rates in in_force:
        for gpu, rate in enumerate(rates.by_gpu):
            if not rate <= highest[gpu] and not math.isnan(rate):
                highest[gpu] = rate
    return highest


def _row(columns: Sequence[Sequence[float]], gpus: tuple[int, ...]) -> RateRow:
    rates: list[float | None] = []
    for column in columns:
        known = [column[gpu] for gpu in gpus if not math.isnan(column[gpu])]
        rates.append(max(known, default=None))
    return RateRow(gpus=gpus, rates=tuple(rates))


def _slowest(columns: Sequence[Sequence[float]], gpus: Sequence[int]) -> list[int]:
    """Those that stood out at some time, in their order; of many the slowest."""
    peaks = {
        gpu: max((column[gpu] for column in columns if column[gpu] >= HEALTHY), default=HEALTHY)
        for gpu in gpus
    }
    out = [gpu for gpu in gpus if peaks[gpu] >= _STANDS_OUT]
    return sorted(sorted(out, key=lambda gpu: -peaks[gpu])[:MOST_ALONE])
