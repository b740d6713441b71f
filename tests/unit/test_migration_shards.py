"""Every element of a model is in exactly one GPU's share, whatever the plan."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.shards import ShardGroup, shard_holdings
from malleus_megatron.migration.transfers import plan_transfers
from tests.harness.decoder import Decoder, random_plan

DECODER = Decoder(num_layers=6)
BUFFER_BYTES = 1024
SEEDS = range(60)


def parameters(seed: int) -> Holdings:
    plan = random_plan(random.Random(seed), num_gpus=8, num_layers=DECODER.num_layers)
    return DECODER.holdings(plan)


def shards(holdings: Holdings) -> list[ShardGroup]:
    return [ShardGroup(group=group) for group in reduction_groups(holdings, BUFFER_BYTES)]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_element_is_kept_once_by_one_of_its_owners(seed: int) -> None:
    held = parameters(seed)
    kept = shard_holdings(shards(held), ("main",), 4, "")
    counts: dict[str, NDArray[np.int64]] = {}
    owned: dict[tuple[int, str], NDArray[np.bool_]] = {}
    for gpu, holdings in held.items():
        for one in holdings:
            key = one.key
            counts.setdefault(key, np.zeros(one.global_shape, dtype=np.int64))
            mask = owned.setdefault((gpu, key), np.zeros(one.global_shape, dtype=np.bool_))
            mask[tuple(slice(*span) for span in one.box.spans)] = True
    for gpu, holdings in kept.items():
        for one in holdings:
            key = one.key.removeprefix("main.")
            where = tuple(slice(*span) for span in one.box.spans)
            counts[key][where] += 1
            assert owned[gpu, key][where].all(), "only owners keep state"
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_are_equal_and_pieces_fill_them_without_a_gap(seed: int) -> None:
    for group in shards(parameters(seed)):
        spans = [group.share(gpu) for gpu in group.owners]
        sizes = [end - start for start, end in spans]
        assert sum(sizes) == group.group.num_elements <= group.padded_size
        assert max(sizes) <= group.share_size
        assert group.padded_size - group.group.num_elements < len(group.owners)
        for gpu, size in zip(group.owners, sizes, strict=True):
            position = 0
            for piece in group.pieces(gpu):
                assert piece.span[0] == position
                assert piece.box.num_elements == piece.span[1] - piece.span[0]
                position = piece.span[1]
            assert position == size


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_of_one_plan_fill_those_of_another(seed: int) -> None:
    """What the next owners need and do not hold is what moves, each element once."""
    before = shard_holdings(shards(parameters(seed)), ("main",), 4, "")
    after = shard_holdings(shards(parameters(seed + 1000)), ("main",), 4, "")
    plan = plan_transfers(before, after, dict.fromkeys(range(8), 0))
    arrived: Counter[int] = Counter()
    for move in (*plan.transfers, *plan.copies):
        arrived[move.destination_gpu] += move.num_bytes
    needed = {gpu: sum(one.num_bytes for one in held) for gpu, held in after.items()}
    assert {gpu: num for gpu, num in arrived.items() if num} == needed


def test_optimizer_groups_are_not_mixed() -> None:
    """Slices with other weight decay are in buffers of their own."""
    held = {
        gpu: [replace(one, optimizer_group=int("norm" in one.key)) for one in holdings]
        for gpu, holdings in parameters(7).items()
    }
    for group in shards(held):
        numbers = {int("norm" in part.key) for part in group.group.slices}
        assert numbers == {group.group.optimizer_group}
