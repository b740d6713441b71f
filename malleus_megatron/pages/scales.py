"""Axes: round numbers to write beside them, and numbers as short text."""

import math
from collections.abc import Sequence
from itertools import pairwise

from malleus_megatron.plan.rates import HEALTHY

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#666666")
"""For lines. Told apart also by eyes that do not tell red from green."""

UNKNOWN = "-"
"""In the place of a number."""

_FINEST = 1e-9
"""Of the largest number: finer steps of an axis could not be told apart."""
_NOTHING = 1e-290

RATE_LIMITS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Where one colour of the rates ends and the next begins; the colours are in style.css."""


def rate_class(rate: float | None) -> str:
    """The style of a rate: r0 (healthy) to r6, `failed`, or `unknown`."""
    if rate is None or math.isnan(rate):
        return "unknown"
    if math.isinf(rate):
        return "failed"
    shown = float(f"{rate:.3g}")  # what is written as 3.00 has the colour of 3
    return f"r{sum(shown >= limit for limit in RATE_LIMITS)}"


def rate_legend() -> list[tuple[str, str]]:
    """Style and meaning of every colour of the rates."""
    limits = (None, *RATE_LIMITS, None)
    ranges = [
        f"below {high:g}" if low is None else f"{low:g} and more" if high is None else f"{low:g}+"
        for low, high in pairwise(limits)
    ]
    named = [(f"r{number}", text) for number, text in enumerate(ranges)]
    return [*named, ("failed", "failed"), ("unknown", "not measured")]


def round_scale(lowest: float, highest: float, *, about: int = 5) -> list[float]:
    """Round numbers, evenly spaced, from at or below the lowest to at or above the highest.

    Args:
        lowest: A finite number.
        highest: The same or more.
        about: So many steps, or up to twice as many.
    """
    largest = max(abs(lowest), abs(highest))
    span = max(highest - lowest, _FINEST * largest) if highest > lowest else largest
    span = span if largest > _NOTHING else HEALTHY
    step = _round_up(span / about)
    first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def factor_scale(lowest: float, highest: float) -> list[float]:
    """The numbers 1, 2, 5 and their powers of ten from below the lowest to above the highest."""
    start = math.floor(math.log10(lowest)) - 1
    powers = range(start, math.ceil(math.log10(highest)) + 2)
    numbers = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(index for index, number in enumerate(numbers) if number <= lowest)
    last = min(index for index, number in enumerate(numbers) if number > highest)
    return numbers[first : last + 1]


def iteration_ticks(first: int, last: int) -> list[int]:
    """The first iteration, and a few round ones up to the last."""
    step = int(_round_up(max(1.0, (last - first + 1) / 5)))
    if step == 1:
        return list(range(first, last + 1))
    rounds = range(step * math.ceil(first / step), last + 1, step)
    return [first, *(tick for tick in rounds if tick - first >= step / 2)]


def tick_texts(scale: Sequence[float]) -> list[str]:
    """The numbers of an axis, all with the decimals that their distance needs."""
    step = min((b - a for a, b in pairwise(scale)), default=HEALTHY)
    if max(map(abs, scale)) >= 1e6 or step < 1e-6:
        return [f"{value:.3g}" for value in scale]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:.{decimals}f}" for value in scale]


def short(value: float | None, digits: int = 4) -> str:
    """A number in a few significant digits, without an exponent where it is of common size."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value) or value == 0:
        return f"{value:g}"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def seconds(value: float | None) -> str:
    """A time with its unit."""
    text = short(value)
    return text if text == UNKNOWN else f"{text} s"


def mebibytes(num_bytes: float | None) -> str:
    """A size with its unit."""
    if num_bytes is None:
        return UNKNOWN
    size = num_bytes / 2**20
    return f"{short(size / 1024)} GiB" if size >= 10240 else f"{short(size)} MiB"


def in_words(names: Sequence[object]) -> str:
    """a, b and c."""
    words = [str(name) for name in names]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1] if words else "")))


def _round_up(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
