"""How long a layout stays the best one: within that time the next one must earn its switch."""

from dataclasses import dataclass

from malleus_megatron.plan.plan import Plan

_REMEMBERED = 2
"""Ended lives that count beside the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Lives of the layouts that were best one after the other, in force or not.

    Those in force would not do: a layout that is held back for its price lets the one before live
    on, and that would make the next switch look worth its price.
    """

    best: Plan | None = None
    """The layout that is best now; None: nothing was seen yet."""
    since: int | None = None
    """The iteration after which it was; None: since before all that was seen."""
    ended: tuple[int, ...] = ()
    """Iterations of the last lives that began and ended."""

    def after(self, iteration: int, best: Plan) -> "Lives":
        """The lives with this layout as the best one after an iteration."""
        if self.best is None:
            return Lives(best=best)
        if best.same_layout(self.best):
            return self
        lived = () if self.since is None else (iteration - self.since,)
        ended = (*self.ended, *lived)[-_REMEMBERED:]
        return Lives(best=best, since=iteration, ended=ended)

    def expected(self, iteration: int, horizon: int) -> float:
        """Iterations, at least 1, over which a switch now is counted to earn what it takes.

        The mean of the last three lives, the present one with its age: a job that has calmed down
        gets its horizon back by itself. Until two lives have ended it is the horizon.
        """
        if self.since is None or len(self.ended) < _REMEMBERED:
            return float(horizon)
        mean = (sum(self.ended) + iteration - self.since) / (len(self.ended) + 1)
        return max(1.0, min(float(horizon), mean))
