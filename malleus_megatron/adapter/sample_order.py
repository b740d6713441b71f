"""Which samples a global micro-batch covers, for each of Megatron's samplers.

Micro-batches are counted over the whole job from where the loader starts: number g is what stock
Megatron gives data-parallel rank g mod DP as its (g div DP)-th micro-batch. Each order below is
the closed form of one sampler of `megatron.training.datasets.data_samplers`, so that any rank can
start at any number without walking through all that comes before.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.training.datasets import data_samplers

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.microbatches import deal


class SampleOrder(Protocol):
    """The samples of every global micro-batch."""

    @property
    def endless(self) -> bool:
        """Whether Megatron goes on with another epoch after the last sample."""

    def samples(self, micro_batch: int) -> list[int] | None:
        """The dataset indices of one global micro-batch; None after the last one."""


class SequentialOrder:
    """`MegatronPretrainingSampler`: one pass; the last incomplete turn of all ranks is dropped."""

    endless = False

    def __init__(self, sampler: Any) -> None:
        """Read the sizes from a sampler of any rank that has not been iterated over."""
        self._total = sampler.total_samples
        self._start = sampler.consumed_samples
        self._size = sampler.micro_batch_size
        self._turn = sampler.micro_batch_times_data_parallel_size

    def samples(self, micro_batch: int) -> list[int] | None:
        """The dataset indices of one global micro-batch; None after the last one."""
        first = self._start + micro_batch * self._size
        end_of_turn = first + self._turn - (first - self._start) % self._turn
        return list(range(first, first + self._size)) if end_of_turn <= self._total else None


class ShuffledOrder:
    """`MegatronPretrainingRandomSampler`: epoch after epoch, each in a random order of its own."""

    endless = True

    def __init__(self, sampler: Any) -> None:
        """Read the sizes from a sampler of any rank that has not been iterated over.

        Raises:
            BadInputError: a dataset whose samples depend on the epoch.
        """
        if isinstance(sampler.dataset, data_samplers.RandomSeedDataset):
            raise BadInputError(
                "A RandomSeedDataset gives other samples in each epoch; it cannot be shared out."
            )
        self._start = sampler.consumed_samples
        self._size = sampler.micro_batch_size
        self._ranks = sampler.data_parallel_size
        self._turn = self._size * self._ranks
        self._epoch = sampler.total_samples - sampler.total_samples % self._turn
        self._sharded = bool(sampler.data_sharding)
        self._shuffled = sampler.total_samples - sampler.total_samples % self._size
        if self._sharded:
            self._shuffled = self._epoch // self._ranks
        # Two epochs: at their border some ranks are still in the old one.
        self._permutation = functools.lru_cache(maxsize=2)(_permutation)

    def samples(self, micro_batch: int) -> list[int] | None:
        """The dataset indices of one global micro-batch.

        Raises:
            BadInputError: as Megatron, at the first read: fewer samples than one micro-batch a
                rank, or a start within a turn of all ranks.
        """
        self._check()
        turn, rank = divmod(micro_batch, self._ranks)
        epoch, offset = divmod(self._start + turn * self._turn, self._epoch)
        if offset == 0 and self._is_rest(turn, rank):
            epoch, offset = epoch - 1, self._epoch
        order = self._permutation(epoch, self._shuffled)
        if self._sharded:
            first = offset // self._ranks
            return [rank * self._shuffled + i for i in order[first : first + self._size].tolist()]
        last = offset + rank + self._ranks * (self._size - 1)
        return order[offset + rank : last + 1 : self._ranks].tolist()

    def _check(self) -> None:
        if not self._epoch:
            raise BadInputError(
                f"The dataset has fewer samples than one micro-batch of {self._size} for each of "
                f"{self._ranks} data-parallel ranks."
            )
        if self._start % self._epoch % self._turn:
            raise BadInputError(
                f"Reading starts after {self._start} samples, which is no multiple of "
                f"{self._turn} (micro-batch size x data-parallel size) in its epoch."
            )

    def _is_rest(self, turn: int, rank: int) -> bool:
        """Whether this rank, at the end of an epoch, still takes a micro-batch of its rest.

        Samples that do not fill a turn of all ranks can fill a micro-batch of the first ranks.
        Megatron gives it to them in place of their first one of the next epoch, or, where an epoch
        is a single turn, of all the next epoch.
        """
        if turn == 0 or self._sharded:
            return False
        fills_one = self._epoch + rank + self._ranks * (self._size - 1) < self._shuffled
        return fills_one and (self._epoch > self._turn or turn % 2 == 1)


class FullValidationOrder:
    """`MegatronFullValidationSampler`: single samples; each rank starts over at its own end."""

    endless = True

    def __init__(self, sampler: Any) -> None:
        """Read the sizes from a sampler of any rank."""
        self._total = sampler.total_samples
        self._ranks = sampler.data_parallel_size

    def samples(self, micro_batch: int) -> list[int] | None:
        """The dataset index of one global micro-batch.

        Raises:
            BadInputError: as Megatron, at the first read: a rank would have no sample.
        """
        if self._total < self._ranks:
            raise BadInputError(
                f"{self._total} validation samples for {self._ranks} data-parallel ranks; "
                "--full-validation needs one each."
            )
        turn, rank = divmod(micro_batch, self._ranks)
        own = range(rank, self._total, self._ranks)
        return [own[turn % len(own)]]


def order_of(sampler: Any) -> SampleOrder:
    """The order in which Megatron's samplers, one for each data-parallel rank, take samples.

    Args:
        sampler: Of a loader that Megatron has just built, for any data-parallel rank.

    Raises:
        BadInputError: a sampler that cannot be shared out in another way.
    """
    # Not isinstance: the sampler of hybrid context parallelism is a subclass with another order.
    order = _ORDERS.get(type(sampler))
    if order is None:
        raise BadInputError(
            f"A loader with a {type(sampler).__name__} for its samples cannot be shared out."
        )
    return order(sampler)


_ORDERS: dict[type, type[SequentialOrder | ShuffledOrder | FullValidationOrder]] = {
    data_samplers.MegatronPretrainingSampler: SequentialOrder,
    data_samplers.MegatronPretrainingRandomSampler: ShuffledOrder,
    data_samplers.MegatronFullValidationSampler: FullValidationOrder,
}


def microbatches_of(pipeline: int, counts: Sequence[int], first: int) -> Iterator[int]:
    """The global micro-batches of one pipeline, step after step without end.

    Args:
        pipeline: Whose micro-batches to give.
        counts: Micro-batches of each pipeline in a step; this pipeline has at least one.
        first: The global micro-batch with which the first step begins.
    """
    own = [k for k, owner in enumerate(deal(counts)) if owner == pipeline]
    if not own:
        raise AssertionError(f"Pipeline {pipeline} has no micro-batch in {tuple(counts)}.")
    for begin in itertools.count(first, sum(counts)):
        yield from (begin + k for k in own)


def sample_batches(order: SampleOrder, micro_batches: Iterator[int]) -> Iterator[list[int]]:
    """The samples of some global micro-batches, until the order ends."""
    for micro_batch in micro_batches:
        indices = order.samples(micro_batch)
        if indices is None:
            return
        yield indices


def _permutation(epoch: int, size: int) -> torch.Tensor:
    """Megatron's random order of so many samples in one epoch."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(epoch))
