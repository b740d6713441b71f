"""A division of groups into pipelines, with its micro-batches and its value."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from malleus_megatron.planner.batches import filled
from malleus_megatron.planner.pipelines import Pattern, PipelineBook


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Groups of every pipeline, its micro-batches, and the whole's value in seconds."""

    patterns: tuple[Pattern, ...]
    counts: tuple[int, ...]
    value_s: float


def divided(book: PipelineBook, patterns: Sequence[Pattern]) -> Division:
    """Share the micro-batches out exactly (why: `batches.balance_microbatches`).

    Equal pipelines stand side by side. The value is inf where a pipeline cannot hold the model.
    """
    ordered = tuple(sorted(patterns))
    times = [partial(book.value, pattern) for pattern in ordered]
    counts = filled(times, [1] * len(ordered), book.costs.num_microbatches)
    value_s = max(time_of(count) for time_of, count in zip(times, counts, strict=True))
    return Division(patterns=ordered, counts=tuple(counts), value_s=value_s)
