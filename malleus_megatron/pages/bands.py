"""Too many points for a picture become bands: what was lowest, in the middle and highest."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The values of a span of iterations, both ends included."""

    first: int
    last: int
    lowest: float
    middle: float
    """The median."""
    highest: float
    num_values: int


def width_of_spans(first: int, last: int, most: int) -> int:
    """Iterations a span must hold for all to be at most so many."""
    return max(1, math.ceil((last - first + 1) / most))


def bands(points: Iterable[tuple[int, float | None]], first: int, width: int) -> tuple[Band, ...]:
    """The points by spans of equal width; values that are no finite number are left out.

    Args:
        points: Iteration and value, in any order.
        first: Where the first span begins.
        width: Iterations of a span.
    """
    spans: dict[int, list[tuple[int, float]]] = {}
    for iteration, value in points:
        if value is not None and math.isfinite(value):
            spans.setdefault((iteration - first) // width, []).append((iteration, value))
    return tuple(_band(spans[number]) for number in sorted(spans))


def _band(points: Sequence[tuple[int, float]]) -> Band:
    iterations = [iteration for iteration, _ in points]
    values = [value for _, value in points]
    return Band(
        first=min(iterations),
        last=max(iterations),
        lowest=min(values),
        middle=median(values),
        highest=max(values),
        num_values=len(values),
    )
