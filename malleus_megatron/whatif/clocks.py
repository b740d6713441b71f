"""How far the clocks of several ranks are apart, from when each entered and left a collective."""

from collections.abc import Sequence
from dataclasses import dataclass

Stamps = Sequence[tuple[float, float]]
"""Of one rank: its clock before and after each of several collectives, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What a rank's clock shows more than that of rank 0."""

    seconds: float
    error_s: float
    """It is off by no more than that."""


def clock_offsets(stamps: Sequence[Stamps]) -> list[Offset]:
    """Of every rank, from collectives that nobody leaves before all have entered.

    Rank i has left after rank 0 had entered, and rank 0 after rank i: each collective holds the
    offset between two bounds, all together between the tightest. Where they allow 0 it is 0:
    processes of one host read one clock, and clocks of two hosts count from when each was started.

    Args:
        stamps: By rank; of the same collectives in the same order.
    """
    reference = stamps[0]
    found = []
    for own in stamps:
        pairs = [*zip(own, reference, strict=True)]
        lowest_s = max(before_s - other_s for (before_s, _), (_, other_s) in pairs)
        highest_s = min(after_s - other_s for (_, after_s), (other_s, _) in pairs)
        middle_s = 0.0 if lowest_s <= 0.0 <= highest_s else (lowest_s + highest_s) / 2
        error_s = max(highest_s - middle_s, middle_s - lowest_s)
        found.append(Offset(seconds=middle_s, error_s=error_s))
    found[0] = Offset(seconds=0.0, error_s=0.0)
    return found
