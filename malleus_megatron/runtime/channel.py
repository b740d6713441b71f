"""Collectives of small CPU tensors over the world, with few connections for each rank.

A gloo group connects every member with every other one: over a thousand ranks that is a thousand
sockets a rank, and a ring with as many hops. So a large world talks in two levels: ranks with
consecutive numbers make up a block, and the first of each block, its leader, speaks for it. With
blocks of sqrt(N) ranks a leader holds some 2 sqrt(N) connections. A small world is one block.

Every method is a collective over the world: all ranks call it, in the same order.
"""

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_ONE_BLOCK = 64
"""Up to so many ranks are one block."""


class Channel:
    """Two levels of gloo groups. No call waits longer for another rank than the time limit."""

    def __init__(self, timeout: timedelta, *, block_size: int | None = None) -> None:
        """Make the groups; a collective.

        Args:
            timeout: How long a rank waits for the others at each level.
            block_size: Ranks of a block; None: as the world's size asks for.
        """
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._timeout = timeout
        size = block_size or _block_size(self.world_size)
        self._leaders = range(0, self.world_size, size)
        self._size = size
        blocks = [range(first, min(first + size, self.world_size)) for first in self._leaders]
        self._ranks = blocks[self.rank // size]
        self._block = [self._group(ranks) for ranks in blocks][self.rank // size]
        self._is_one_block = len(blocks) == 1
        self._top = None if self._is_one_block else self._group(self._leaders)
        """The leaders' group; None on other ranks."""

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        least = torch.tensor([number])
        if self._is_one_block:
            self._wait(dist.all_reduce(least, dist.ReduceOp.MIN, self._block, async_op=True))
            return int(least)
        leader = self._ranks[0]
        self._wait(dist.reduce(least, leader, dist.ReduceOp.MIN, self._block, async_op=True))
        if self._top is not None:
            self._wait(dist.all_reduce(least, dist.ReduceOp.MIN, self._top, async_op=True))
        self._broadcast(least, leader, self._block)
        return int(least)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give all ranks the tensor of one, in place."""
        if source in self._ranks:
            self._broadcast(tensor, source, self._block)
        if self._top is not None:
            self._broadcast(tensor, source - source % self._size, self._top)
        if source not in self._ranks:
            self._broadcast(tensor, self._ranks[0], self._block)

    def gather(self, row: Tensor) -> Tensor | None:
        """Give rank 0 the rows of all ranks, by rank: [world size, length]; None elsewhere."""
        found = self._rows_at(self._ranks[0], row, self._ranks, self._block)
        if found is None or self._top is None:
            return found
        padded = row.new_zeros(self._size, len(row))  # the last block may have fewer ranks
        padded[: len(found)] = found
        blocks = self._rows_at(0, padded, self._leaders, self._top)
        return None if blocks is None else blocks.flatten(0, 1)[: self.world_size]

    def all_gather(self, row: Tensor) -> Tensor:
        """Give all ranks the rows of all ranks, by rank: [world size, length]."""
        rows = row.new_empty(self.world_size, len(row))
        if self._is_one_block:
            flat = rows.view(-1)
            self._wait(dist.all_gather_into_tensor(flat, row, self._block, async_op=True))
            return rows
        found = self.gather(row)
        if found is not None:
            rows.copy_(found)
        self.broadcast(rows)
        return rows

    def _rows_at(
        self, receiver: int, row: Tensor, members: range, group: dist.ProcessGroup | None
    ) -> Tensor | None:
        """What a group's members hold, at one of them: [members, ...]."""
        rows = row.new_empty(len(members), *row.shape) if self.rank == receiver else None
        places = None if rows is None else list(rows)
        self._wait(dist.gather(row, places, receiver, group, async_op=True))
        return rows

    def _broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
        self._wait(dist.broadcast(tensor, source, group, async_op=True))

    def _group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """None on ranks that are not in it."""
        made = dist.new_group(list(ranks), backend="gloo", timeout=self._timeout)
        return made if isinstance(made, dist.ProcessGroup) else None

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self._timeout)


def _block_size(world_size: int) -> int:
    return world_size if world_size <= _ONE_BLOCK else math.ceil(math.sqrt(world_size))
