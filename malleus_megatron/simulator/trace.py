"""An injection as spans of iterations in which all rates stay the same."""

from dataclasses import dataclass
from itertools import pairwise

from malleus_megatron.plan.injection import Injection
from malleus_megatron.plan.rates import HEALTHY, Rates

TAIL = 50
"""Iterations after the last change, where nobody says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Iterations with the same rates, half open, from 1."""

    from_iteration: int
    to_iteration: int
    rates: Rates

    @property
    def num_iterations(self) -> int:
        """Length of the span."""
        return self.to_iteration - self.from_iteration


def default_num_iterations(injection: Injection) -> int:
    """Up to `TAIL` iterations after the last change of a rate."""
    return max(_changes(injection), default=1) - 1 + TAIL


def situations(injection: Injection, num_iterations: int) -> tuple[Situation, ...]:
    """The trace up to its last iteration; neighbours have different rates."""
    bounds = {change for change in _changes(injection) if 1 < change <= num_iterations}
    found: list[Situation] = []
    for start, end in pairwise(sorted({1, num_iterations + 1} | bounds)):
        rates = _rates_at(injection, start)
        same = found.pop() if found and found[-1].rates == rates else None
        first = start if same is None else same.from_iteration
        found.append(Situation(from_iteration=first, to_iteration=end, rates=rates))
    return tuple(found)


def _changes(injection: Injection) -> set[int]:
    ends = {entry.to_iteration for entry in injection.entries if entry.to_iteration is not None}
    return ends | {entry.from_iteration for entry in injection.entries}


def _rates_at(injection: Injection, iteration: int) -> Rates:
    """Where spans of a GPU overlap its largest rate holds, as in a job."""
    rates: dict[int, float] = {}
    for entry in injection.entries:
        if entry.holds_in(iteration):
            rates[entry.gpu] = max(entry.rate, rates.get(entry.gpu, 0.0))
    return Rates.of({gpu: rate for gpu, rate in rates.items() if rate != HEALTHY})
