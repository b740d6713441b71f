"""Every split of a step's micro-batches reads the samples that stock Megatron reads."""

import contextlib
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

EQUAL = [(2, 2, 2, 2)] * 5
UNEVEN = [(2, 2, 2, 2), (5, 1, 1, 1), (5, 1, 1, 1), (1, 3, 2, 2), (2, 2, 2, 2)]
GROWING = [(1, 1, 1, 1), (2, 1, 3, 2), (4, 2, 6, 4), (4, 4, 4, 4), (2, 3, 6, 5)]


class Numbered(Dataset[dict[str, int]]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index}


def read_steps(
    rank: int, world: int, loader_type: str, size: int, steps: list[tuple[int, ...]], consumed: int
) -> list[list[list[int]]]:
    """The sample numbers of each micro-batch of each step of this rank."""
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader

    from malleus_megatron.adapter.data import TrainBatches

    batches = TrainBatches(
        Numbered(size), consumed, build=build_pretraining_data_loader, pause=contextlib.nullcontext
    )
    read = []
    for iteration, counts in enumerate(steps, start=1):
        batches.begin_step(iteration, counts)
        step = [next(batches)["index"].tolist() for _ in range(counts[rank])]
        batches.begin_step(iteration, counts)
        read.append(step)
    return read


def as_rank(
    loader_type: str,
    size: int,
    steps: list[tuple[int, ...]],
    consumed: int = 0,
    num_workers: int = 0,
    data_sharding: bool = False,
) -> list[list[list[int]]]:
    """Stand in for one data-parallel rank of a Megatron job."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.training import global_vars

    multiprocessing.set_start_method("fork", force=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    arguments: dict[str, Any] = {
        "dataloader_type": loader_type,
        "micro_batch_size": 2,
        "global_batch_size": 2 * sum(steps[0]),
        "num_workers": num_workers,
        "data_sharding": data_sharding,
        "exit_signal_handler": False,
        "full_validation": False,
        "hybrid_context_parallel": False,
    }
    global_vars.set_args(SimpleNamespace(**arguments))
    mpu.get_data_parallel_rank = lambda *_, **__: rank
    mpu.get_data_parallel_world_size = lambda *_, **__: world
    torch.manual_seed(1)
    return read_steps(rank, world, loader_type, size, steps, consumed)


def by_step(ranks: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """Per step, the micro-batches of all ranks in an order of their own."""
    return [sorted(batch for rank in ranks for batch in rank[step]) for step in range(len(ranks[0]))]


def stock_steps(steps: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same steps with equal counts."""
    return [(sum(counts) // len(counts),) * len(counts) for counts in steps]


@pytest.mark.parametrize("steps", [UNEVEN, GROWING], ids=["uneven", "growing"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_samples_of_each_step_are_stocks(
    steps: list[tuple[int, ...]], num_workers: int
) -> None:
    size = 2 * sum(map(sum, steps)) + 4
    stock = run_ranks(4, as_rank, "single", size, stock_steps(steps), 0, num_workers)
    ours = run_ranks(4, as_rank, "single", size, steps, 0, num_workers)
    assert by_step(ours) == by_step(stock)
    read = [sample for step in by_step(ours) for batch in step for sample in batch]
    assert sorted(read) == list(range(2 * sum(map(sum, steps))))


@pytest.mark.parametrize("data_sharding", [False, True])
def test_random_order_is_stocks_across_epochs(data_sharding: bool) -> None:
    """54 samples are 3 steps of 16 and a rest: five steps cross into the second epoch."""
    stock = run_ranks(4, as_rank, "cyclic", 54, EQUAL, 0, 0, data_sharding)
    ours = run_ranks(4, as_rank, "cyclic", 54, UNEVEN, 0, 0, data_sharding)
    assert by_step(ours) == by_step(stock)


def test_a_resumed_job_goes_on_where_it_was() -> None:
    whole = run_ranks(4, as_rank, "single", 100, UNEVEN)
    resumed = run_ranks(4, as_rank, "single", 100, UNEVEN[2:], 32)
    assert by_step(resumed) == by_step(whole)[2:]


def test_equal_counts_are_megatrons_own_order_on_every_rank() -> None:
    """Not only the same samples: the same ones on the same rank in the same order."""
    stock = run_ranks(4, as_rank, "single", 100, EQUAL)
    expected = [[[8 * j + 2 * rank, 8 * j + 2 * rank + 1] for j in range(10)] for rank in range(4)]
    assert [[batch for step in rank for batch in step] for rank in stock] == expected
