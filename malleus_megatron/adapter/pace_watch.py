"""Whether this machine holds the pace of a paced run, judged over all ranks."""

from collections.abc import Sequence
from typing import Any

from malleus_megatron.adapter.rows import BoundaryRow

_TOLERATED_SHARE = 0.02


class PaceWatch:
    """Counts layer calls that took longer than the pace, from the second iteration on."""

    def __init__(self) -> None:
        """Nothing seen."""
        self.calls = 0
        self.misses = 0
        self._warm_up: tuple[int, int, float] | None = None
        self._told = False

    def look(self, rows: Sequence[BoundaryRow]) -> str | None:
        """Take in the counts of all ranks so far; once, what to say if the pace is not held."""
        calls = int(sum(row.pace_calls for row in rows))
        misses = int(sum(row.pace_misses for row in rows))
        worst = max(row.pace_worst_ratio for row in rows)
        if self._warm_up is None:
            self._warm_up = (calls, misses, worst)
        self.calls, self.misses = calls - self._warm_up[0], misses - self._warm_up[1]
        if self._told or self.misses <= _TOLERATED_SHARE * self.calls:
            return None
        self._told = True
        how_much = f", the worst {worst:.1f} times" if worst > self._warm_up[2] else ""
        return (
            f"The pace is not held: {self.misses} of {self.calls} layer calls took longer than it "
            f"allows{how_much}. Step times are partly this machine's; set longer times in the pace "
            "file, or run fewer ranks."
        )

    def summary(self) -> dict[str, Any]:
        """For the event log, at the end."""
        return {"calls": self.calls, "misses": self.misses}
