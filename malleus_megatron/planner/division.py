"""A division of groups into pipelines, with its micro-batches and its value."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from malleus_megatron.planner.batches import filled
from malleus_megatron.planner.pipelines import Pattern, PipelineBook

BISECTIONS = 12
MOST_BISECTIONS = 60
FEW_LEFT = 1024
"""Micro-batches that may be handed out one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Groups of every pipeline, its micro-batches, and the whole's value in seconds."""

    patterns: tuple[Pattern, ...]
    counts: tuple[int, ...]
    value_s: float


def divided(book: PipelineBook, patterns: Sequence[Pattern]) -> Division:
    """Share the micro-batches out exactly (why: `batches.balance_microbatches`).

    Every pipeline first gets what it can do within a limit at which that is not too much: the
    greedy rule would do the same, one by one. Equal pipelines stand side by side. The value is inf
    where a pipeline cannot hold the model.
    """
    ordered = tuple(sorted(patterns))
    total = book.costs.num_microbatches
    counts = _safe_counts(book, ordered, total)
    times = [partial(book.value, pattern) for pattern in ordered]
    counts = filled(times, counts, total)
    value_s = max(time_of(count) for time_of, count in zip(times, counts, strict=True))
    return Division(patterns=ordered, counts=tuple(counts), value_s=value_s)


def _safe_counts(book: PipelineBook, patterns: Sequence[Pattern], total: int) -> list[int]:
    number = Counter(patterns)
    ends_s = [book.value(pattern, total) for pattern in number]
    if total <= FEW_LEFT and max(ends_s) == inf:
        return [1] * len(patterns)
    low_s, high_s = 0.0, max((end_s for end_s in ends_s if end_s < inf), default=0.0)
    counts = dict.fromkeys(number, 1)
    given = len(patterns)
    for bisections in range(MOST_BISECTIONS):
        if bisections >= BISECTIONS and total - given <= FEW_LEFT:
            break
        middle_s = (low_s + high_s) / 2
        tried = {pattern: max(1, book.capacity(pattern, middle_s)) for pattern in number}
        able = sum(number[pattern] * count for pattern, count in tried.items())
        if able <= total:
            counts, given, low_s = tried, able, middle_s
        else:
            high_s = middle_s
    return [counts[pattern] for pattern in patterns]


def without_idle_stragglers(book: PipelineBook, division: Division) -> Division:
    """Leave out slow groups that the step does not need: their GPUs go on standby."""
    patterns = []
    for pattern, count in zip(division.patterns, division.counts, strict=True):
        kept = pattern
        for group in sorted(set(pattern), key=lambda group: (-group[1], group)):
            while group[1] > 1 and group in kept and len(kept) > 1:
                index = kept.index(group)
                fewer = (*kept[:index], *kept[index + 1 :])
                if book.value(fewer, count) > division.value_s:
                    break
                kept = fewer
        patterns.append(kept)
    return Division(patterns=tuple(patterns), counts=division.counts, value_s=division.value_s)
