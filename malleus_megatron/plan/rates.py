"""Straggling rates: a GPU's time for a piece of work / a healthy GPU's time for it."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.fields import to_float

HEALTHY = 1.0

RATE_NEWS = 0.05
"""A rate that has moved by this much of itself is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One rate per GPU that is not healthy; the others are 1. `inf` is a failed GPU."""

    by_gpu: tuple[tuple[int, float], ...] = ()
    """Sorted by GPU."""

    def __post_init__(self) -> None:
        """Refuse rates that are no positive number."""
        for gpu, rate in self.by_gpu:
            check_rate(gpu, rate)
        gpus = [gpu for gpu, _ in self.by_gpu]
        if gpus != sorted(set(gpus)):
            raise BadInputError(f"Rates must name each GPU once, in order; got {gpus}.")

    @classmethod
    def of(cls, rates: Mapping[int, float]) -> "Rates":
        """From a mapping GPU -> rate."""
        return cls(by_gpu=tuple(sorted(rates.items())))

    def __getitem__(self, gpu: int) -> float:
        """The rate of a GPU; one that is not named is healthy."""
        found = bisect_left(self.by_gpu, (gpu,))  # (gpu,) lies just before (gpu, its rate)
        if found < len(self.by_gpu) and self.by_gpu[found][0] == gpu:
            return self.by_gpu[found][1]
        return HEALTHY

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Pairs (GPU, rate)."""
        return iter(self.by_gpu)


def have_moved(before: Rates, now: Rates, by: float) -> bool:
    """True if a GPU's rate is another by this much of itself."""
    old, new = dict(before), dict(now)
    return any(
        not abs(new.get(gpu, HEALTHY) / old.get(gpu, HEALTHY) - 1) <= by
        for gpu in old.keys() | new.keys()
        if new.get(gpu, HEALTHY) != old.get(gpu, HEALTHY)
    )


def check_rate(gpu: int, rate: object) -> float:
    """Return the rate as a float.

    Raises:
        BadInputError: not a number, NaN, zero or negative; the message names GPU and value.
    """
    number = to_float(rate)
    if number is None:
        raise BadInputError(f"GPU {gpu}: rate {rate!r} is not a number.")
    if math.isnan(number) or number <= 0:
        raise BadInputError(f"GPU {gpu}: rate {rate} must be above 0 (1 = healthy, inf = failed).")
    return number
