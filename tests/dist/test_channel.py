"""The channel gives the same answers whether the world is one block or several."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from malleus_megatron.runtime.channel import Channel, _block_size
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.dist

WORLD = 7
TIMEOUT = timedelta(seconds=20)


def answers(block_size: int | None) -> dict[str, Any]:
    channel = Channel(TIMEOUT, block_size=block_size)
    row = torch.tensor([channel.rank, 0.5, -channel.rank], dtype=torch.float64)
    gathered = channel.gather(row)
    heard = []
    for source in range(channel.world_size):
        word = torch.full((3,), channel.rank)
        channel.broadcast(word, source)
        heard.append(word.tolist())
    return {
        "gathered": None if gathered is None else gathered.tolist(),
        "all gathered": channel.all_gather(row).tolist(),
        "heard": heard,
        "least": [channel.least((channel.rank + k) % WORLD + 3) for k in range(WORLD)],
    }


@pytest.mark.parametrize("block_size", [None, 1, 2, 3, 4, 6, WORLD])
def test_every_size_of_block_gives_the_same_answers(block_size: int | None) -> None:
    rows = [[rank, 0.5, -rank] for rank in range(WORLD)]
    for rank, answer in enumerate(run_ranks(WORLD, answers, block_size)):
        assert answer == {
            "gathered": rows if rank == 0 else None,
            "all gathered": rows,
            "heard": [[source] * 3 for source in range(WORLD)],
            "least": [3] * WORLD,
        }


def num_sockets(block_size: int | None) -> int:
    """Connections of one rank that the channel has made."""

    def count() -> int:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    before = count()
    channel = Channel(TIMEOUT, block_size=block_size)
    channel.least(1)
    return count() - before


def test_blocks_save_connections() -> None:
    in_one = run_ranks(12, num_sockets, None)
    in_blocks = run_ranks(12, num_sockets, 4)
    assert min(in_one) >= 11
    assert max(in_blocks) <= 3 + 2 + 2  # a block, the leaders, and a socket to listen for each


def test_a_large_world_has_blocks_of_its_square_root() -> None:
    assert _block_size(8) == 8
    assert _block_size(64) == 64
    assert _block_size(1024) == 32
    assert _block_size(1000) == 32


def told_of_a_rank_that_has_gone() -> tuple[str, float]:
    channel = Channel(timedelta(seconds=8), block_size=3)
    assert channel.least(1) == 1
    start = time.monotonic()
    if channel.rank == 4:
        return "gone", 0.0
    try:
        for _ in range(2):  # what needs nothing of rank 4 may still go through
            channel.least(1)
            channel.all_gather(torch.zeros(1))
    except RuntimeError:
        return "heard", time.monotonic() - start
    return "missed it", time.monotonic() - start


def test_a_rank_that_goes_is_noticed_in_every_block() -> None:
    found = run_ranks(WORLD, told_of_a_rank_that_has_gone)
    assert [what for what, _ in found] == ["heard"] * 4 + ["gone"] + ["heard"] * 2
    assert max(seconds for _, seconds in found) < 20
