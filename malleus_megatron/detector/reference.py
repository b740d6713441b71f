"""Which GPUs are healthy, where some are slow and some may be fast."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from statistics import median

_SLOWER = 1.0
_SLOWER_THAN_BEFORE = 0.3
_FASTER = 2.5
"""GPUs do get slow, and several at a time; hardly one is much faster than healthy ones of its kind.
So one that is alone in front is the reference only if fewer than three agree on another."""


def healthy_level(values: Iterable[float], usual: float | None, alike: float) -> float:
    """What healthy GPUs show: the value that has the most plausible exceptions.

    With every value as a candidate, the GPUs that are slower and those that are faster count as
    exceptions. Where GPUs still show what healthy ones always showed, slower ones weigh less: it
    is likelier that these have slowed down than that all have and a few became faster.

    Args:
        values: Logarithms of times over expected times, at least one; not sorted.
        usual: What healthy GPUs showed so far, if that is known.
        alike: Values that differ by no more than that are the same but for noise.

    Returns:
        The median of those that agree.
    """
    ordered = sorted(values)

    def cost(candidate: float) -> float:
        faster = bisect_left(ordered, candidate - alike)
        slower = len(ordered) - bisect_right(ordered, candidate + alike)
        is_usual = usual is not None and abs(candidate - usual) <= alike
        return faster * _FASTER + slower * (_SLOWER_THAN_BEFORE if is_usual else _SLOWER)

    centre = min(ordered, key=cost)
    for _ in range(2):  # the second time around the middle of the group, not one of its ends
        centre = median(
            ordered[bisect_left(ordered, centre - alike) : bisect_right(ordered, centre + alike)]
        )
    return centre
