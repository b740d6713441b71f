"""Groups by rank set: one for each set, in whatever order its ranks are named, bounded in number."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from malleus_megatron.runtime import groups as module
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist


def use_groups() -> tuple[float, int, bool]:
    groups = module.Groups(timedelta(seconds=30))
    groups.make([(0,), (1, 2), (2, 1), (0, 1, 2)])
    groups.make([(2, 1), (0,)])
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=groups.of((2, 1, 0)))
    same = dist.get_rank() == 0 or groups.of((1, 2)) is groups.of((2, 1))
    return tensor.item(), len(groups), same


def test_a_set_is_made_once() -> None:
    assert run_ranks(3, use_groups) == [(3.0, 3, True)] * 3


def overflow() -> tuple[list[tuple[int, ...]], float]:
    module.MAX_GROUPS = 2
    groups = module.Groups(timedelta(seconds=30))
    groups.make([(0,), (1,), (2,), (1, 2)])
    groups.trim()
    groups.make([(1,), (0, 1)])
    groups.trim()  # only rank 1 has three
    tensor = torch.ones(1)
    if dist.get_rank() < 2:
        dist.all_reduce(tensor, group=groups.of((0, 1)))
    return list(groups._made), tensor.item()


def ask_for_many() -> int:
    module.MAX_GROUPS = 1
    groups = module.Groups(timedelta(seconds=30))
    groups.make([(0,), (1,)])
    groups.make([(0, 1)])
    groups.trim()
    return len(groups)


def test_what_one_plan_needs_is_never_given_up() -> None:
    assert run_ranks(2, ask_for_many) == [3, 3]


def test_the_oldest_is_given_up_beyond_the_bound() -> None:
    """Only once the next plan is in force: until then the old one's are needed."""
    kept = [(0,), (1,), (2,), (0, 1)]
    assert run_ranks(3, overflow) == [(kept, 2.0), (kept, 2.0), (kept, 1.0)]


def give_up() -> tuple[list[int], bool, float]:
    groups = module.Groups(timedelta(seconds=30))
    groups.make([(0, 1)])
    groups.trim()
    sizes = [len(groups), len(dist.distributed_c10d._world.pg_map)]
    groups.make([(0, 1), (0,), (0, 1, 2)])
    groups.give_up_unused()
    sizes += [len(groups), len(dist.distributed_c10d._world.pg_map)]
    groups.give_up_unused()
    groups.make([(0, 1, 2)])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=groups.of((0, 1, 2)))
    kept = dist.get_rank() == 2 or dist.get_rank(groups.of((0, 1))) == dist.get_rank()
    return sizes, kept, tensor.item()


def test_what_a_failed_switch_has_made_is_given_up_and_nothing_else() -> None:
    for sizes, kept, total in run_ranks(3, give_up):
        assert sizes[:2] == sizes[2:]
        assert kept
        assert total == 3.0
