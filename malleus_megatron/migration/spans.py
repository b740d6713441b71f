"""Spans of a flattened tensor as boxes: how a shard that ignores rows is seen as a rectangle."""

import math
from collections.abc import Iterator

from malleus_megatron.migration.boxes import Box, Span


def boxes_of_span(box: Box, span: Span) -> Iterator[tuple[Box, Span]]:
    """Cut a span of a box's elements, counted in row order, into boxes.

    A part of the first row, whole rows, a part of the last row; and so on inside the rows.

    Args:
        box: The whole, of any number of axes.
        span: First element and the one after the last; clipped to the box.

    Yields:
        Each part as a box, with its own span in the whole; in row order, without a gap.
    """
    start, end = max(span[0], 0), min(span[1], box.num_elements)
    if start >= end:
        return
    if (start, end) == (0, box.num_elements):
        yield box, (start, end)
        return
    row = math.prod(box.shape[1:])
    first, last = -(-start // row), end // row
    if first > last:
        # All of it lies inside one row.
        yield from _inside_row(box, start // row, (start, end))
        return
    yield from _inside_row(box, first - 1, (start, first * row))
    if first < last:
        offset = (box.offset[0] + first, *box.offset[1:])
        whole = Box(offset=offset, shape=(last - first, *box.shape[1:]))
        yield whole, (first * row, last * row)
    yield from _inside_row(box, last, (last * row, end))


def _inside_row(box: Box, row: int, span: Span) -> Iterator[tuple[Box, Span]]:
    """The boxes of a span that lies inside one row of the first axis."""
    if span[0] >= span[1]:
        return
    first = row * math.prod(box.shape[1:])
    inner = Box(offset=box.offset[1:], shape=box.shape[1:])
    for part, (low, high) in boxes_of_span(inner, (span[0] - first, span[1] - first)):
        lifted = Box(offset=(box.offset[0] + row, *part.offset), shape=(1, *part.shape))
        yield lifted, (first + low, first + high)
