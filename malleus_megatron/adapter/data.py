"""Training data under any split of micro-batches: same samples in the same order as stock.

Stock Megatron gives data-parallel rank d, as its j-th micro-batch of a step, what we call global
micro-batch k = j * DP + d. A plan says which pipeline computes which k (plan.microbatches.deal).
With equal counts that is Megatron's own order, so Megatron's own loader is used as it is.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from megatron.core import mpu
from megatron.training import get_args
from megatron.training.datasets import data_samplers
from torch.utils.data import DataLoader

from malleus_megatron.plan.microbatches import deal

BuildLoader = Callable[[Any, int], DataLoader[Any] | None]
Pause = Callable[[], AbstractContextManager[None]]


class TrainBatches:
    """The training micro-batches of this rank; its split can change between steps.

    Megatron takes it for a data loader and iterates over it once. Samples are addressed by index,
    so what data workers have fetched ahead for an old split is dropped without loss.
    """

    def __init__(
        self, dataset: Any, consumed_samples: int, *, build: BuildLoader, pause: Pause
    ) -> None:
        """Start in Megatron's own order.

        Args:
            dataset: What the recipe's provider built for this rank.
            consumed_samples: Where the job starts in the sample order.
            build: Megatron's `build_pretraining_data_loader`.
            pause: Held while a micro-batch is waited for, which is no compute.
        """
        self._dataset = dataset
        self._start = consumed_samples
        self._build = build
        self._pause = pause
        self._counts: tuple[int, ...] | None = None
        self._iteration: int | None = None
        self._read = 0
        self._reading = 0
        self._source = self._open(None)

    def __iter__(self) -> Self:
        """The one iterator there is."""
        return self

    def __next__(self) -> Any:
        """The next micro-batch of this rank's pipeline."""
        with self._pause():
            return next(self._source)

    def begin_step(self, iteration: int, counts: Sequence[int]) -> None:
        """Say how many micro-batches each pipeline gets in this step. A rerun of it is harmless.

        Args:
            iteration: Of the step that is about to read.
            counts: One for each pipeline.
        """
        if iteration == self._iteration:
            return
        self._iteration = iteration
        self._read += self._reading
        self._reading = sum(counts) // len(counts)
        split = None if len(set(counts)) == 1 else tuple(counts)
        if split != self._counts:
            self._counts = split
            self._source = self._open(split)

    def _open(self, counts: tuple[int, ...] | None) -> Iterator[Any]:
        """Micro-batches from the present position on, under one split."""
        pipeline = mpu.get_data_parallel_rank()
        loader = self._build(self._dataset, self._start)
        if loader is None:
            raise AssertionError("Megatron built no loader for a dataset that exists.")
        if counts is None and self._read == 0:
            return iter(_endless(loader) if _cyclic() else loader)
        streams = [
            self._indices(rank)
            for rank in range(mpu.get_data_parallel_world_size())
            if counts is not None or rank == pipeline
        ]
        order = deal(counts) if counts is not None else [0]
        mine = pipeline if counts is not None else 0
        return iter(_loader_like(loader, _dealt(streams, order, mine)))

    def _indices(self, data_parallel_rank: int) -> Iterator[list[int]]:
        """Megatron's own sample indices of one data-parallel rank, from the present position on."""
        args = get_args()
        size = mpu.get_data_parallel_world_size()
        if _cyclic():
            sampler = data_samplers.MegatronPretrainingRandomSampler(
                self._dataset,
                total_samples=len(self._dataset),
                consumed_samples=self._start,
                micro_batch_size=args.micro_batch_size,
                data_parallel_rank=data_parallel_rank,
                data_parallel_size=size,
                data_sharding=args.data_sharding,
            )
            return itertools.islice(_endless(sampler), self._read, None)
        sampler = data_samplers.MegatronPretrainingSampler(
            total_samples=len(self._dataset),
            consumed_samples=self._start + self._read * size * args.micro_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=size,
        )
        return iter(sampler)


def _cyclic() -> bool:
    return bool(get_args().dataloader_type == "cyclic")


def _endless(batches: Any) -> Iterator[Any]:
    """Epoch after epoch; a sampler goes on from what it has consumed."""
    while True:
        yield from batches


def _dealt(
    streams: Sequence[Iterator[list[int]]], order: Sequence[int], pipeline: int
) -> Iterator[list[int]]:
    """The micro-batches of one pipeline, step after step.

    Args:
        streams: One for each data-parallel rank; micro-batch k is the next of stream k mod DP.
        order: The pipeline of each micro-batch of a step.
        pipeline: Whose micro-batches to give.
    """
    for micro_batch in itertools.count():
        indices = next(streams[micro_batch % len(streams)], None)
        if indices is None:
            return
        if order[micro_batch % len(order)] == pipeline:
            yield indices


def _loader_like(loader: DataLoader[Any], batch_sampler: Iterator[list[int]]) -> DataLoader[Any]:
    """Megatron's loader with other sample indices."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )
