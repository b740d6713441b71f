"""When what a step took of every GPU's memory is worth an event."""

from collections.abc import Sequence

from malleus_megatron.plan.plan import Plan

_NEWS = 0.02
"""A peak that has moved by this much of itself."""


class MemoryNews:
    """A layout is measured again and again, and mostly as before."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._plan: Plan | None = None
        self._peaks_mib: tuple[float, ...] = ()

    def take(self, plan: Plan, peaks_mib: Sequence[float]) -> bool:
        """Whether a measurement is news; if it is, it counts as told.

        Args:
            plan: In force while it was taken.
            peaks_mib: Of each GPU.
        """
        is_known = self._plan is not None and plan.same_layout(self._plan)
        if is_known and not any(
            abs(new - old) >= _NEWS * max(new, old)
            for old, new in zip(self._peaks_mib, peaks_mib, strict=True)
            if new != old
        ):
            return False
        self._plan, self._peaks_mib = plan, tuple(peaks_mib)
        return True
