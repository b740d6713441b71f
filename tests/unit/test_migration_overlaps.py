"""The search for overlapping boxes against one that looks at every box."""

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.migration.boxes import Box, box_of
from malleus_megatron.migration.holdings import BoxIndex, Holding
from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.shards import ShardGroup, shard_holdings
from malleus_megatron.migration.transfers import plan_transfers
from tests.harness.decoder import Decoder, random_plan

SIZE = 12


@st.composite
def box_lists(draw: st.DrawFn) -> list[Box]:
    """Of one tensor; those of an axis are short, long or of any length, or all the same."""
    num_axes = draw(st.integers(0, 4))
    longest = [draw(st.sampled_from([1, 2, SIZE])) for _ in range(num_axes)]
    rng = random.Random(draw(st.integers(0, 2**32)))
    return [random_box(rng, longest) for _ in range(draw(st.integers(1, 60)))]


def random_box(rng: random.Random, longest: Sequence[int]) -> Box:
    starts = [rng.randrange(SIZE) for _ in longest]
    sizes = [
        rng.randint(1, min(most, SIZE - start)) for start, most in zip(starts, longest, strict=True)
    ]
    return Box(offset=tuple(starts), shape=tuple(sizes))


def index_of(boxes: Sequence[Box]) -> BoxIndex:
    return BoxIndex((gpu, holding_of(box)) for gpu, box in enumerate(boxes))


def holding_of(box: Box) -> Holding:
    shape = (SIZE,) * len(box.shape)
    return Holding(key="key", global_shape=shape, box=box, element_bytes=4, name="key")


def by_looking_at_all(index: BoxIndex, box: Box) -> list[Box]:
    return [other for other in index.boxes if other.overlaps(box)]


@given(box_lists())
def test_found_are_the_overlapping_boxes_in_the_order_of_all(boxes: list[Box]) -> None:
    index = index_of(boxes)
    assert index.boxes == sorted(set(boxes), key=lambda box: (box.offset, box.shape))
    for box in boxes:
        assert index.overlapping(box) == by_looking_at_all(index, box)


@given(box_lists())
def test_a_box_that_is_not_of_the_index_is_looked_for_as_well(boxes: list[Box]) -> None:
    half = len(boxes) // 2
    index = index_of(boxes[:half])
    for box in boxes[half:]:
        assert index.overlapping(box) == by_looking_at_all(index, box)


def test_scalars_and_an_index_of_nothing() -> None:
    scalar = Box(offset=(), shape=())
    assert index_of([scalar, scalar]).overlapping(scalar) == [scalar]
    assert index_of([]).overlapping(scalar) == []
    assert index_of([]).overlapping(box_of([(0, 3), (1, 2)])) == []


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_search_is_short_whichever_axis_the_boxes_divide(axis: int) -> None:
    """Sixteen times the shares of each of twenty layers: not sixteen times as long a search."""

    def seconds(shares: int) -> float:
        spans = [[(0, 4)] * 3 for _ in range(20 * shares)]
        for number, of_box in enumerate(spans):
            layer, share = divmod(number, shares)
            of_box[axis - 1] = (layer, layer + 1)
            of_box[axis] = (share, share + 1)
        boxes = [box_of(of_box) for of_box in spans]
        index = index_of(boxes)
        wanted = random.Random(0).choices(boxes, k=1000)
        begun = time.process_time()
        for box in wanted:
            index.overlapping(box)
        return time.process_time() - begun

    assert seconds(1600) < 8 * seconds(100)


def test_transfers_are_those_that_a_search_of_all_boxes_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The optimizer's state in shares, between random plans."""
    rng = random.Random(0)
    decoder = Decoder(num_layers=3, query_groups=8, ffn=16, hidden=16)
    node_of = {gpu: gpu // 4 for gpu in range(16)}
    pairs = []
    for _ in range(20):
        first, second = (with_shares(decoder, rng) for _ in range(2))
        pairs.append((first, second, plan_transfers(first, second, node_of)))
    monkeypatch.setattr(BoxIndex, "overlapping", by_looking_at_all)
    for first, second, made in pairs:
        assert made == plan_transfers(first, second, node_of)


def with_shares(decoder: Decoder, rng: random.Random) -> dict[int, list[Holding]]:
    held = decoder.holdings(random_plan(rng, num_gpus=16, num_layers=3))
    groups = [ShardGroup(group=group) for group in reduction_groups(held, 2**10)]
    shares = shard_holdings(groups, ("main", "exp_avg"), 4, "")
    return {gpu: [*whole, *shares.get(gpu, ())] for gpu, whole in held.items()}
