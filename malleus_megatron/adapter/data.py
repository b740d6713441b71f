"""Micro-batches under any plan: same samples in the same order as stock.

Stock Megatron gives data-parallel rank d, as its j-th micro-batch of a step, what we call global
micro-batch k = j * DP + d. A plan says which pipeline computes which k (plan.microbatches.deal).
Where that is Megatron's own order for this rank, Megatron's own loader is used as it is.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from malleus_megatron.adapter.sample_order import microbatches_of, order_of, sample_batches

BuildLoader = Callable[[Any, int], DataLoader[Any] | None]
Pause = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NominalReader:
    """Where this rank stands among the readers of the nominal plan."""

    data_parallel_rank: int
    data_parallel_size: int
    reads: bool = True
    """Whether stock Megatron has a loader on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A division of a step's micro-batches that is not Megatron's own, as this rank sees it."""

    counts: tuple[int, ...]
    pipeline: int | None


class Batches:
    """The micro-batches that this rank reads from one dataset; the split can change between steps.

    Megatron takes it for a data loader and iterates over it once. The position moves on by whole
    steps, whatever was read: a step that is left early does not shift the next one. Samples are
    addressed by index, so what data workers have fetched ahead for an old split is dropped without
    loss. Nothing is opened, and no worker started, before the first micro-batch is asked for.
    """

    def __init__(
        self,
        dataset: Any,
        consumed_samples: int,
        *,
        build: BuildLoader,
        pause: Pause,
        nominal: NominalReader,
    ) -> None:
        """Start in Megatron's own order. The nominal view of Megatron's groups is in force.

        Args:
            dataset: What the recipe's provider built.
            consumed_samples: Where the job starts in the sample order.
            build: Megatron's `build_pretraining_data_loader`.
            pause: Held while a micro-batch is waited for, which is no compute.
            nominal: This rank's part in Megatron's own order.

        Raises:
            BadInputError: samples that cannot be shared out in another way.
        """
        loader = build(dataset, consumed_samples)
        if loader is None:
            raise AssertionError("Megatron built no loader for a dataset that exists.")
        self._order = order_of(getattr(loader, "batch_sampler", None))
        self._load = partial(
            DataLoader,
            loader.dataset,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            persistent_workers=loader.persistent_workers,
        )
        # In CPU mode loaders have a generator of their own: the process's is left alone.
        self._draws = nominal.reads and loader.generator is None
        self._length = len(loader)
        self._stock: DataLoader[Any] | None = loader
        self._pause = pause
        self._nominal = nominal
        self._rng_state: torch.Tensor | None = None
        self._source: Iterator[Any] | None = None
        self._split: _Split | None = None
        self._step: int | None = None
        self._position = 0
        """Global micro-batches of all steps before the present one."""
        self._total = 0
        """Micro-batches of the present step, of all pipelines."""
        self._share = 0
        """Micro-batches of the present step that this rank reads."""
        self._read = 0

    def __len__(self) -> int:
        """What Megatron's own loader of this rank says."""
        return self._length

    def __iter__(self) -> Self:
        """The one iterator there is."""
        if self._draws and self._rng_state is None:
            # Stock's loader draws a seed for its workers here. Do so too, on the same ranks, or
            # whatever is drawn next from the CPU's generator would differ from stock.
            self._rng_state = torch.get_rng_state()
            torch.empty((), dtype=torch.int64).random_()
        return self

    def __next__(self) -> Any:
        """The next micro-batch of this rank."""
        if self._split is not None and self._read == self._share:
            raise AssertionError(
                f"All {self._share} micro-batches of step {self._step} are read on this rank."
            )
        with self._pause():
            if self._source is None:
                self._source = self._open()
            batch = next(self._source)
        self._read += 1  # only now: what was not got in full is read again
        return batch

    def begin_step(self, step: int, counts: Sequence[int], pipeline: int | None) -> None:
        """Say how the micro-batches of the next step are split. A rerun of a step is harmless.

        Args:
            step: Names the step; equal to the last one's in a rerun.
            counts: Micro-batches of each pipeline of the plan; together a multiple of the nominal
                data-parallel size.
            pipeline: The one whose micro-batches this rank reads; None: it reads nothing.
        """
        if step == self._step:
            return
        if sum(counts) % self._nominal.data_parallel_size:
            raise AssertionError(
                f"{sum(counts)} micro-batches in a step, which is no multiple of the nominal "
                f"data-parallel size {self._nominal.data_parallel_size}."
            )
        split = self._split_unless_stock(tuple(counts), pipeline)
        if split != self._split or self._read != self._share:
            # The workers of the old source end with the last reference to it.
            self._source = None
        self._split = split
        self._step = step
        self._position += self._total
        self._total = sum(counts)
        self._share = 0 if pipeline is None else counts[pipeline]
        self._read = 0

    def _split_unless_stock(self, counts: tuple[int, ...], pipeline: int | None) -> _Split | None:
        """None if this rank reads what it does in stock: k = j * DP + its own rank for every j."""
        equal = len(counts) == self._nominal.data_parallel_size and len(set(counts)) == 1
        if equal and pipeline == self._nominal.data_parallel_rank:
            return None
        return _Split(counts=counts, pipeline=pipeline)

    def _open(self) -> Iterator[Any]:
        """Micro-batches from the beginning of the present step on, under its split."""
        stock, self._stock = self._stock, None
        if stock is not None and self._split is None and self._position == 0:
            with _rng_kept(self._rng_state):
                first_pass = iter(stock)
            return _endless(first_pass, stock) if self._order.endless else first_pass
        split = self._split or _Split(
            counts=(1,) * self._nominal.data_parallel_size,
            pipeline=self._nominal.data_parallel_rank,
        )
        assert split.pipeline is not None  # such a rank reads nothing
        mine = microbatches_of(split.pipeline, split.counts, self._position)
        with _rng_kept():
            return iter(self._load(batch_sampler=sample_batches(self._order, mine)))


def _endless(first_pass: Iterator[Any], loader: DataLoader[Any]) -> Iterator[Any]:
    """Epoch after epoch; Megatron's sampler goes on from what it has consumed."""
    yield from first_pass
    while True:
        yield from loader


@contextlib.contextmanager
def _rng_kept(state: torch.Tensor | None = None) -> Iterator[None]:
    """Leave the CPU's random generator as it was; meanwhile it goes on from `state`, if given."""
    before = torch.get_rng_state()
    try:
        if state is not None:
            torch.set_rng_state(state)
        yield
    finally:
        torch.set_rng_state(before)
