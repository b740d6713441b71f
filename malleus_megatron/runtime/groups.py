"""Process groups by their set of ranks: made once, by all ranks in the same order, and kept."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

MAX_GROUPS = 32
"""Of one rank. Beyond it groups of earlier plans are given up: a communicator takes memory of the
device. An uneven plan for a thousand GPUs may need twice as many on a few of them; it has them."""


class Groups:
    """The groups that plans need. Every method is called by all ranks, in the same order."""

    def __init__(self, timeout: timedelta) -> None:
        """Nothing is made yet.

        Args:
            timeout: Of every collective in the groups.
        """
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._asked: dict[tuple[int, ...], None] = {}
        self._unused: list[tuple[int, ...]] = []
        """Made since the last plan came into force."""

    def make(self, rank_sets: Iterable[Sequence[int]]) -> None:
        """Make a plan's groups, those that do not exist yet.

        The order of the sets is the same on all ranks.

        Members meet once in each new group: a communicator that was first used inside a pipeline
        would block its two ends there.
        """
        for ranks in rank_sets:
            key = tuple(sorted(ranks))
            self._asked[key] = None
            if key not in self._made:
                self._made[key] = self._new(key)
                self._unused.append(key)

    def give_up_unused(self) -> None:
        """Give up what was made for a plan that did not come into force."""
        for key in self._unused:
            self._give_up(key)
        self._unused.clear()
        self._asked.clear()

    def trim(self) -> None:
        """Give up the oldest groups of ranks beyond the limit; none asked for since the last trim.

        To be called when a plan is in force, so that a switch that failed has lost nothing.
        """
        number = Counter(rank for key in self._made for rank in key)
        for key in list(self._made):
            if key not in self._asked and any(number[rank] > MAX_GROUPS for rank in key):
                self._give_up(key)
                number.subtract(key)
        self._unused.clear()
        self._asked.clear()

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group that was made and that this rank is in.

        Raises:
            KeyError: it was never made here.
        """
        group = self._made[tuple(sorted(ranks))]
        assert group is not None, f"this rank is not one of {sorted(ranks)}"
        return group

    def __len__(self) -> int:
        """How many groups there are."""
        return len(self._made)

    def _give_up(self, key: tuple[int, ...]) -> None:
        group = self._made.pop(key)
        if group is not None:
            dist.destroy_process_group(group)

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        made = dist.new_group(list(ranks), timeout=self._timeout)
        if not isinstance(made, dist.ProcessGroup):
            return None
        device = "cuda" if dist.get_backend(made) == "nccl" else "cpu"
        dist.all_reduce(torch.zeros(1, device=device), group=made)
        return made
