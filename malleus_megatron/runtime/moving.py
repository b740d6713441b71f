"""Batch after batch of a migration on one rank: room, copies, messages, and old state leaves."""

import functools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from malleus_megatron.migration.batches import Batch
from malleus_megatron.runtime.blocks import Blocks
from malleus_megatron.runtime.transport import Carried, Guard, carry_out, copy_own, unguarded


class Leaving:
    """Memory that passes from an old state to a new one."""

    def __init__(self, old: Blocks, new: Blocks, after_change: Callable[[], None]) -> None:
        """Nothing has left yet.

        Args:
            old: Blocks that leave.
            new: Blocks that come; all but the first one have no memory yet.
            after_change: Called when memory has come or gone.
        """
        self._old, self._new = old, new
        self._after_change = after_change
        self.has_begun = False
        """Whether some rank has given back old state: from then on there is no way back."""

    def come(self, names: Sequence[str]) -> None:
        """New blocks get memory."""
        self._new.allocate(names)
        self._after_change()

    def leave(self, names: Sequence[str]) -> None:
        """Old blocks lose theirs."""
        self._old.free(names)
        self._after_change()


def move_batches(
    batches: Sequence[Batch],
    gpu: int,
    *,
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    leaving: Leaving | None = None,
    guard: Guard = unguarded,
) -> Carried:
    """Fill the new tensors; all ranks call it with the same batches.

    Args:
        batches: Of the whole job.
        gpu: This rank's.
        old: This rank's tensors by the names in its holdings.
        new: The tensors to fill.
        leaving: Where old blocks leave on the way; None: all of both states has memory throughout.
        guard: See `carry_out`.

    Returns:
        Bytes that passed between ranks.
    """
    carried = Carried()
    for batch in batches:
        if leaving is not None:
            come = functools.partial(leaving.come, batch.comes.get(gpu, ()))
            guard("making room for new state", come)
        mine = [copy for copy in batch.copies if copy.destination_gpu == gpu]
        guard("copying what is here", functools.partial(copy_own, mine, old, new))
        carried += carry_out(batch.rounds, gpu, old=old, new=new, guard=guard)
        if leaving is not None and batch.leaves:
            leaving.has_begun = True
            leave = functools.partial(leaving.leave, batch.leaves.get(gpu, ()))
            guard("giving back old state", leave)
    return carried
