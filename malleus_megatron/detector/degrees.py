"""A healthy GPU's layer time at every TP degree: learned from the job, else guessed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from malleus_megatron.errors import BadInputError

type TimesByDegree = tuple[tuple[int, float], ...]
"""Pairs (TP degree, forward plus backward of one layer and micro-batch in seconds), sorted."""

_FEWEST_LESSONS, _MOST_LESSONS = 3, 16
_PLAUSIBLE = 1.2
"""A degree's time lies between no gain from more GPUs and perfect scaling, with so much room."""
_SAME = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeTimes:
    """What a layer takes a healthy GPU, by TP degree, relative to each other.

    What a job's GPUs take all together moves and is followed elsewhere; here only ratios count.
    They are learned when GPUs are first seen at a degree, and hold from then on. If each followed
    its own GPUs, one that is alone at its degree could grow slower bit by bit and never be told
    from a healthy one.
    """

    prior: TimesByDegree = ()
    """Known beforehand, and taken as right."""
    learned: TimesByDegree = ()
    lessons: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Of degrees that are being learned: one time an iteration."""
    provisional: frozenset[int] = frozenset()
    """Degrees that were learned from stragglers only, whose rates were known from elsewhere."""

    def knows(self, degree: int) -> bool:
        """True if the degree's time is no guess."""
        return degree in self._known()

    def expected_s(self, degree: int) -> float:
        """The known time, else the same work on other GPUs.

        The latter is T0 / T times the time at the nearest known T0: what perfect scaling takes. A
        smaller group than T0 takes no longer than that, since it has larger products and less to
        exchange.

        Raises:
            BadInputError: nothing was learned and nothing is known beforehand.
        """
        known = self._known()
        if degree in known:
            return known[degree]
        if not known:
            raise BadInputError(f"No GPU has timed a layer yet: degree {degree} has no time.")
        near = nearest(known, degree)
        return known[near] * near / degree

    def is_within_reach(self, degree: int) -> bool:
        """True if the time is known, or guessed for a smaller degree than a known one.

        Perfect scaling to larger groups than were ever seen is a promise that none keeps.
        """
        known = self._known()
        return degree in known or any(degree < other for other in known)

    def anchored(self, degree: int, time_s: float) -> "DegreeTimes":
        """With a first degree, to which all others will be compared."""
        return replace(self, learned=tuple(sorted({**dict(self.learned), degree: time_s}.items())))

    def is_plausible(self, degree: int, time_s: float) -> bool:
        """True if healthy GPUs could take that long: else slow ones at a new degree were seen."""
        near = nearest(known := self._known(), degree)
        ends = known[near], known[near] * near / degree
        return min(ends) / _PLAUSIBLE <= time_s <= max(ends) * _PLAUSIBLE

    def is_learning(self, degree: int) -> bool:
        """True if another lesson about the degree would be of use."""
        return not self.knows(degree) or 0 < len(self.lessons.get(degree, ())) < _MOST_LESSONS

    def taught(self, degree: int, time_s: float, *, by_stragglers: bool) -> "DegreeTimes":
        """With what one iteration showed of a degree; a few make it known, more make it exact."""
        if self.knows(degree) and abs(math.log(time_s / self.expected_s(degree))) > math.log(_SAME):
            return self
        lessons = (*self.lessons.get(degree, ()), time_s)
        taught = replace(
            self,
            lessons={**self.lessons, degree: lessons},
            provisional=self.provisional | {degree} if by_stragglers else self.provisional,
        )
        return (
            taught if len(lessons) < _FEWEST_LESSONS else taught.anchored(degree, median(lessons))
        )

    def without(self, degrees: Iterable[int]) -> "DegreeTimes":
        """With these degrees to be learned anew."""
        gone = frozenset(degrees)
        return replace(
            self,
            learned=tuple(pair for pair in self.learned if pair[0] not in gone),
            lessons={degree: seen for degree, seen in self.lessons.items() if degree not in gone},
            provisional=self.provisional - gone,
        )

    def _known(self) -> dict[int, float]:
        return dict(self.learned) | dict(self.prior)


def nearest(degrees: Iterable[int], degree: int) -> int:
    """The one with the ratio nearest to 1, the larger of two."""
    return min(degrees, key=lambda other: (abs(math.log(other / degree)), -other))
