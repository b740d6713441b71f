"""A healthy GPU's layer time at every TP degree: learned from the job, else guessed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from malleus_megatron.errors import BadInputError

type TimesByDegree = tuple[tuple[int, float], ...]
"""Pairs (TP degree, forward plus backward of one layer and micro-batch in seconds), sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeTimes:
    """What a layer takes a healthy GPU, by TP degree.

    A degree is learned when healthy GPUs are first seen at it, and from then on moves only with
    the anchor: the degree that the job compares its GPUs at. If each followed its own GPUs, one
    that is alone at its degree could grow slower bit by bit and never be told from a healthy one.
    """

    learned: TimesByDegree = ()
    prior: TimesByDegree = ()
    """Known beforehand. Only the ratios count once a degree of it is learned."""

    def knows(self, degree: int) -> bool:
        """True if the degree's time was learned."""
        return degree in dict(self.learned)

    def expected_s(self, degree: int) -> float:
        """The learned time, else the prior in proportion, else the same work on other GPUs.

        The last is T0 / T times the time at the nearest known T0: what perfect scaling takes. A
        smaller group than T0 takes no longer than that, since it has larger products and less to
        exchange.

        Raises:
            BadInputError: neither a time learned nor a prior.
        """
        learned, prior = dict(self.learned), dict(self.prior)
        if degree in learned:
            return learned[degree]
        scales = learned.keys() & prior.keys()
        if degree in prior and scales:
            near = _nearest(scales, degree)
            return learned[near] * prior[degree] / prior[near]
        if degree in prior and not learned:
            return prior[degree]
        known = learned or prior
        if not known:
            raise BadInputError(f"No GPU has timed a layer yet: degree {degree} has no time.")
        near = _nearest(known, degree)
        return known[near] * near / degree

    def is_within_reach(self, degree: int) -> bool:
        """True if the time is known, or guessed for a smaller degree than a known one.

        Perfect scaling to larger groups than were ever seen is a promise that none keeps.
        """
        known = {**dict(self.prior), **dict(self.learned)}
        return degree in known or any(degree < other for other in known)

    def after(self, healthy_s: Mapping[int, float], anchor: int) -> "DegreeTimes":
        """With the times of degrees that have healthy GPUs now.

        Args:
            healthy_s: Their medians; the anchor's is among them.
            anchor: The degree whose present time counts; learned ones move in proportion.
        """
        learned = dict(self.learned)
        scale = healthy_s[anchor] / learned[anchor] if anchor in learned else 1.0
        moved = {degree: time_s * scale for degree, time_s in learned.items()}
        return replace(self, learned=tuple(sorted((dict(healthy_s) | moved).items())))


def _nearest(degrees: Iterable[int], degree: int) -> int:
    """The one with the ratio nearest to 1, the larger of two."""
    return min(degrees, key=lambda other: (abs(math.log(other / degree)), -other))
