"""Rectangles of a tensor: overlap, the finest common cut, merging, splitting."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from malleus_megatron.errors import MigrationError

Span = tuple[int, int]
"""First index on an axis, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle of a tensor with any number of axes. A scalar's box has none."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a box that is empty or starts below 0."""
        if len(self.offset) != len(self.shape):
            raise MigrationError(f"Offset {self.offset} and shape {self.shape} differ in axes.")
        if self.shape and (min(self.shape) < 1 or min(self.offset) < 0):
            raise MigrationError(f"No elements at offset {self.offset} with shape {self.shape}.")

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The range on each axis, half open."""
        return tuple(
            (start, start + size) for start, size in zip(self.offset, self.shape, strict=True)
        )

    def overlaps(self, other: "Box") -> bool:
        """True if some elements are in both."""
        axes = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        for start, size, begin, extent in axes:
            if start >= begin + extent or begin >= start + size:
                return False
        return True

    def slices_of(self, part: "Box") -> tuple[slice, ...]:
        """Where a part of this box lies in a tensor that has this box's shape."""
        return tuple(
            slice(start - mine, start - mine + size)
            for mine, start, size in zip(self.offset, part.offset, part.shape, strict=True)
        )

    def split(self, max_elements: int) -> Iterator["Box"]:
        """Parts of at most so many elements, cut along the longest axis first."""
        if self.num_elements <= max_elements:
            yield self
            return
        axis = max(range(len(self.shape)), key=self.shape.__getitem__)
        spans = self.spans
        start, end = spans[axis]
        step = max(1, max_elements * self.shape[axis] // self.num_elements)
        for low in range(start, end, step):
            part = (*spans[:axis], (low, min(low + step, end)), *spans[axis + 1 :])
            yield from box_of(part).split(max_elements)


def box_of(spans: Sequence[Span]) -> Box:
    """The box with these ranges."""
    return Box(
        offset=tuple(start for start, _ in spans), shape=tuple(end - start for start, end in spans)
    )


def cells(within: Box, boxes: Sequence[Box]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut a box so finely that each of the others covers a cell wholly or not at all.

    Yields:
        Each cell, with the indices of the boxes that cover it. In row order.
    """
    all_spans = [box.spans for box in boxes]
    yield from _cut((), within.spans, range(len(boxes)), all_spans)


def _cut(
    done: tuple[Span, ...],
    rest: tuple[Span, ...],
    inside: Sequence[int],
    boxes: Sequence[tuple[Span, ...]],
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut the first axis that is left only where boxes end that reach into what is done."""
    if not rest or not inside:
        yield box_of(done + rest), tuple(inside)
        return
    start, end = rest[0]
    spans = [boxes[i][len(done)] for i in inside]
    clipped = [(min(max(low, start), end), max(min(high, end), start)) for low, high in spans]
    bounds = sorted({start, end}.union(*clipped))
    place = {bound: number for number, bound in enumerate(bounds)}
    covering: list[list[int]] = [[] for _ in bounds]
    for i, (low, high) in zip(inside, clipped, strict=True):
        for number in range(place[low], place[high]):
            covering[number].append(i)
    for span, those in zip(pairwise(bounds), covering, strict=False):
        yield from _cut((*done, span), rest[1:], those, boxes)


def merged(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in fewer boxes: neighbours are joined, along the last axis first.

    The boxes must not overlap. The result is in row order.
    """
    found = list(boxes)
    if len(found) == 1:
        return found
    spans = [box.spans for box in found]
    for axis in reversed(range(len(spans[0]) if spans else 0)):
        spans = _joined(spans, axis)
    return sorted(map(box_of, spans), key=lambda box: box.offset)


def _joined(boxes: list[tuple[Span, ...]], axis: int) -> list[tuple[Span, ...]]:
    """Join boxes that follow each other on this axis and are the same on all others."""
    joined: list[tuple[Span, ...]] = []
    for box in sorted(boxes, key=lambda spans: (spans[:axis], spans[axis + 1 :], spans[axis])):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last[axis][1] == box[axis][0]
            and last[:axis] == box[:axis]
            and last[axis + 1 :] == box[axis + 1 :]
        ):
            joined[-1] = (*box[:axis], (last[axis][0], box[axis][1]), *box[axis + 1 :])
        else:
            joined.append(box)
    return joined
