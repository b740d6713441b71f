"""Loaders as stock Megatron builds and reads them, for any data-parallel rank in one process.

To be used on a rank of `run_ranks`: Megatron is imported inside the functions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils.data import Dataset


class Numbered(Dataset[dict[str, int]]):
    """Sample i is the number i; as a validation split if `split` is set."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_read = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        self.num_read += 1
        return {"index": index}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The flags that make up the sample order."""

    size: int
    """Samples of the dataset."""
    ranks: int
    """Nominal data-parallel size."""
    loader_type: str = "single"
    micro_batch_size: int = 2
    eval_micro_batch_size: int = 2
    consumed: int = 0
    data_sharding: bool = False
    validation: bool = False
    full_validation: bool = False
    num_workers: int = 0

    @property
    def cycles(self) -> bool:
        """Whether Megatron reads the loader again at its end."""
        return self.loader_type == "cyclic" or self.full_validation

    def dataset(self) -> Numbered:
        """A dataset of its own."""
        from megatron.core.datasets.utils import Split

        dataset = Numbered(self.size)
        if self.validation or self.full_validation:
            dataset.split = Split.valid  # type: ignore[attr-defined]
        return dataset


def build_as(recipe: Recipe, rank: int) -> Callable[[Any, int], Any]:
    """Megatron's `build_pretraining_data_loader` as one data-parallel rank calls it."""
    from megatron.training.datasets import data_samplers

    arguments = SimpleNamespace(
        dataloader_type=recipe.loader_type,
        micro_batch_size=recipe.micro_batch_size,
        global_batch_size=recipe.micro_batch_size * recipe.ranks,
        eval_micro_batch_size=recipe.eval_micro_batch_size,
        eval_global_batch_size=recipe.eval_micro_batch_size * recipe.ranks,
        num_workers=recipe.num_workers,
        data_sharding=recipe.data_sharding,
        full_validation=recipe.full_validation,
        exit_signal_handler=False,
        hybrid_context_parallel=False,
    )
    groups = SimpleNamespace(
        get_data_parallel_rank=lambda: rank, get_data_parallel_world_size=lambda: recipe.ranks
    )

    def build(dataset: Any, consumed: int) -> Any:
        with (
            mock.patch.object(data_samplers, "get_args", lambda: arguments),
            mock.patch.object(data_samplers, "mpu", groups),
        ):
            return data_samplers.build_pretraining_data_loader(dataset, consumed)

    return build


def iterate(recipe: Recipe, loader: Any) -> Iterator[Any]:
    """A loader, ours or Megatron's, as build_train_valid_test_data_iterators iterates over it."""
    from megatron.training.training import cyclic_iter

    iterator: Iterator[Any] = iter(cyclic_iter(loader)) if recipe.cycles else iter(loader)
    return iterator


class StockJob:
    """The samples of every global micro-batch, read by all data-parallel ranks of a stock job."""

    def __init__(self, recipe: Recipe) -> None:
        dataset = recipe.dataset()
        self._ranks = [
            iterate(recipe, build_as(recipe, rank)(dataset, recipe.consumed))
            for rank in range(recipe.ranks)
        ]

    def step(self, num_microbatches: int) -> list[list[int]]:
        """The next micro-batches of all ranks, in global order."""
        return [
            next(self._ranks[k % len(self._ranks)])["index"].tolist()
            for k in range(num_microbatches)
        ]
