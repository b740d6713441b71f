"""When rates are worth telling again: every measurement moves all of them a little."""

from collections.abc import Collection

from malleus_megatron.plan.rates import RATE_NEWS, Rates, have_moved

_SELDOM = 100
"""Iterations between two that are told for the sake of small changes."""
_CLEARLY = 0.1
"""A straggler's rate that has moved by this much of itself is told at once."""
_SETTLING = 16
"""Iterations in which what is known of a new straggler still grows: its small changes count."""


class RateNews:
    """Rates of all GPUs, told when a straggler's has changed clearly, and else now and then.

    Among a thousand GPUs one has moved by a few per cent in nearly every iteration.
    """

    def __init__(self) -> None:
        """Nothing was told yet: the first rates are news."""
        self.told = Rates()
        self._stragglers: frozenset[int] = frozenset()
        self._told_in = self._settled_in = 0

    def take(self, iteration: int, rates: Rates, stragglers: Collection[int]) -> bool:
        """Whether these rates are news; if they are, they count as told.

        Args:
            iteration: The one that was measured.
            rates: Of all GPUs; none as long as too little was seen.
            stragglers: Those among them.
        """
        now = frozenset(stragglers)
        if iteration < self._told_in:  # the job began again, from a checkpoint say
            self._told_in = self._settled_in = 0
            self.told = Rates()
        if not rates.by_gpu or not self._are_news(iteration, rates, now):
            return False
        if now != self._stragglers:
            self._settled_in = iteration + _SETTLING
        self.told, self._stragglers, self._told_in = rates, now, iteration
        return True

    def _are_news(self, iteration: int, rates: Rates, now: frozenset[int]) -> bool:
        if not self.told.by_gpu or now != self._stragglers:
            return True
        if iteration >= self._told_in + _SELDOM:
            return have_moved(self.told, rates, by=RATE_NEWS)
        before, after = (Rates.of({gpu: one[gpu] for gpu in now}) for one in (self.told, rates))
        return have_moved(before, after, by=_CLEARLY if iteration > self._settled_in else RATE_NEWS)
