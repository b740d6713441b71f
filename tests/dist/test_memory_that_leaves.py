"""Tensors without memory for a while, the peak that they save, and links between ranks."""

from datetime import timedelta

import pytest
import torch

from malleus_megatron.cost.migration import LinkSpeeds
from malleus_megatron.errors import MigrationError
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.blocks import Blocks, give_back, present
from malleus_megatron.runtime.links import measure_links
from malleus_megatron.runtime.peak import PeakMemory
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist


def test_views_of_a_tensor_live_through_its_memory_leaving_and_coming_back() -> None:
    tensor = torch.arange(12.0)
    view = tensor[3:6]
    blocks = Blocks({"a": [tensor], "b": [torch.zeros(2)]})
    blocks.free(["a"])
    assert tensor.untyped_storage().nbytes() == 0
    assert (tensor.shape, view.shape) == ((12,), (3,))
    blocks.allocate(["a", "b"])
    assert tensor.untyped_storage().nbytes() == 48
    tensor.fill_(7.0)
    assert view.tolist() == [7.0] * 3


def test_a_block_that_never_had_memory_gets_it() -> None:
    tensor = torch.empty(5, dtype=torch.float64)
    give_back([tensor])
    blocks = Blocks({"a": [tensor]})
    blocks.allocate(["a"])
    assert tensor.untyped_storage().nbytes() == 40
    give_back([tensor])
    with present([tensor], afterwards=False):
        part = tensor[1:3]
    assert (part.shape, tensor.untyped_storage().nbytes()) == ((2,), 0)


def test_memory_that_others_need_is_not_given_back() -> None:
    lent, shared = torch.zeros(4), torch.zeros(8)
    lent.numpy()
    with pytest.raises(MigrationError, match="the memory of m cannot be given back"):
        Blocks({"m": [lent]}).check()
    with pytest.raises(MigrationError, match="b lies in the memory of a"):
        Blocks({"a": [shared[:4]], "b": [shared[4:]]}).check()
    Blocks({"a": [shared[:4], shared[4:]], "c": [torch.zeros(1)]}).check()


def test_the_peak_counts_each_memory_once_as_long_as_it_lives() -> None:
    old = [torch.zeros(1000), torch.zeros(500)]
    old.append(old[0][10:])
    memory = PeakMemory(old)
    with memory.watched():
        give_back([old[1]])
        new = torch.ones(300)
        more = new.repeat(4)  # 1000 + 300 + 1200 elements at the most
        del more
        old[1].untyped_storage().resize_(2000)
        memory.look()
    memory.end([new, old[0]])
    assert (memory.before_bytes, memory.peak_bytes, memory.after_bytes) == (6000, 10000, 5200)
    assert memory.extra_bytes == 4000


def speeds_on(node_of: dict[int, int]) -> LinkSpeeds:
    return measure_links(Agreement(timedelta(seconds=20)), node_of, torch.device("cpu"))


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 2, 3)])
def test_all_ranks_measure_the_same_speeds_whatever_the_nodes(nodes: tuple[int, ...]) -> None:
    """Some have no neighbour inside their node, some none outside."""
    found = run_ranks(4, speeds_on, dict(enumerate(nodes)))
    assert len(set(found)) == 1
    for value in (found[0].inside_bytes_per_s, found[0].between_bytes_per_s):
        assert 1e6 < value < 1e12
    assert found[0].copy_bytes_per_s > 1e7
    assert 0 < found[0].round_s < 5
