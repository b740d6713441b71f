"""Transfers against an oracle that paints every element, for thousands of plan pairs."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding, Holdings
from malleus_megatron.migration.transfers import TransferPlan, plan_transfers
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from tests.harness.decoder import STATES, Decoder, random_plan
from tests.harness.painting import Arrays, Truth, lower_bound_bytes, move, zeros

NUM_PAIRS = 2000
KINDS = ("norm_1", "qkv", "proj", "fc1")
ONE_NODE = dict.fromkeys(range(64), 0)


def nodes_of(size: int) -> dict[int, int]:
    return {gpu: gpu // size for gpu in range(64)}


def nominal(tp: int, pp: int, dp: int, num_layers: int = 4) -> Plan:
    return nominal_plan(
        num_layers=num_layers,
        num_microbatches=8,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
    )


def random_holdings(rng: random.Random) -> tuple[Holdings, Holdings]:
    """The same model under two plans of the same world."""
    num_gpus, num_layers = rng.randint(4, 10), rng.randint(1, 2)
    decoder = Decoder(
        num_layers=num_layers,
        tied=rng.random() < 0.5,
        kinds=tuple(rng.sample(KINDS, 2)),
        states=("", "optimizer.exp_avg.") if rng.random() < 0.2 else ("",),
    )
    first, second = (
        decoder.holdings(random_plan(rng, num_gpus=num_gpus, num_layers=num_layers))
        for _ in range(2)
    )
    return first, second


def migrated(old: Arrays, made: TransferPlan, needed: Holdings) -> Arrays:
    """New local tensors, each element of which arrived once."""
    new, arrived = zeros(needed), zeros(needed)
    move(made.copies + made.transfers, old, new, arrived)
    assert all((count == 1).all() for count in arrived.values())
    return new


@pytest.mark.parametrize("start", range(0, NUM_PAIRS // 2, 250))
def test_there_and_back_every_element_arrives_once_and_no_byte_too_many(start: int) -> None:
    for seed in range(start, start + 250):
        rng = random.Random(seed)
        first, second = random_holdings(rng)
        node_of = nodes_of(rng.choice([2, 4, 8]))
        truth = Truth.of(first, second)
        begun, expected = truth.local(first), truth.local(second)
        there = migrated(begun, checked(first, second, node_of), second)
        assert same(there, expected), seed
        assert same(migrated(there, checked(second, first, node_of), first), begun), seed


def checked(held: Holdings, needed: Holdings, node_of: dict[int, int]) -> TransferPlan:
    """A transfer plan without a byte too many."""
    made = plan_transfers(held, needed, node_of)
    assert made.received_bytes() == lower_bound_bytes(held, needed)
    assert all(one.source_gpu == one.destination_gpu for one in made.copies)
    assert all(one.source_gpu != one.destination_gpu for one in made.transfers)
    return made


def same(ours: Arrays, theirs: Arrays) -> bool:
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[name], theirs[name]) for name in ours
    )


def test_the_same_plan_moves_nothing() -> None:
    held = Decoder(num_layers=4).holdings(nominal(2, 2, 2))
    made = plan_transfers(held, held, ONE_NODE)
    assert made.transfers == ()
    assert len(made.copies) == sum(map(len, held.values()))
    assert all(one.source is one.destination for one in made.copies)


def test_dicts_in_another_order_give_the_same_transfers() -> None:
    for seed in range(50):
        held, needed = random_holdings(random.Random(seed))
        again = plan_transfers(turned(held), turned(needed), turned_nodes(4))
        assert again == plan_transfers(held, needed, nodes_of(4))


def turned(holdings: Holdings) -> Holdings:
    return dict(reversed(list(holdings.items())))


def turned_nodes(size: int) -> dict[int, int]:
    return dict(reversed(list(nodes_of(size).items())))


def test_neighbours_come_in_one_piece() -> None:
    """From TP 1 to TP 4: a transfer for each tensor that a GPU gets, however others are cut."""
    decoder = Decoder(num_layers=2)
    held = decoder.holdings(nominal(1, 1, 1, num_layers=2))
    needed = decoder.holdings(nominal(4, 1, 1, num_layers=2))
    made = plan_transfers(held, needed, ONE_NODE)
    assert len(made.transfers) == sum(len(held) for gpu, held in needed.items() if gpu)
    back = plan_transfers(needed, held, ONE_NODE)
    per_layer = sum(
        tensor.parts * 3 for tensor in decoder.layer_tensors() if tensor.cut is not None
    )
    assert len(back.transfers) == 2 * per_layer + 3  # and the embedding


def weight(gpu_rows: dict[int, tuple[int, int]], rows: int = 8) -> Holdings:
    """One matrix, cut by rows."""
    return {
        gpu: [
            Holding(
                key="weight",
                global_shape=(rows, 4),
                box=Box(offset=(start, 0), shape=(end - start, 4)),
                element_bytes=2,
                name="weight",
            )
        ]
        for gpu, (start, end) in gpu_rows.items()
    }


def test_what_comes_from_one_tensor_comes_in_one_piece() -> None:
    """Others that hold parts of it do not cut it."""
    held = weight({0: (0, 4), 1: (4, 8), 4: (0, 8)})
    made = plan_transfers(held, weight({4: (0, 8), 5: (0, 8)}), nodes_of(4))
    whole = Box(offset=(0, 0), shape=(8, 4))
    assert [(one.source_gpu, one.box) for one in made.transfers] == [(4, whole)]
    assert [(one.source_gpu, one.box) for one in made.copies] == [(4, whole)]


def test_what_a_gpu_holds_stays_there() -> None:
    made = plan_transfers(weight({0: (0, 4), 1: (4, 8)}), weight({0: (2, 8)}), ONE_NODE)
    (copy,) = made.copies
    (transfer,) = made.transfers
    assert copy.box == Box(offset=(2, 0), shape=(2, 4))
    assert (copy.source_slices[0], copy.destination_slices[0]) == (slice(2, 4), slice(0, 2))
    assert transfer.box == Box(offset=(4, 0), shape=(4, 4))
    assert (transfer.source_gpu, transfer.num_bytes) == (1, 32)
    assert (transfer.source_slices[0], transfer.destination_slices[0]) == (slice(0, 4), slice(2, 6))


def test_an_owner_on_the_same_node_sends() -> None:
    held = weight({0: (0, 8), 1: (0, 8), 2: (0, 8), 5: (0, 8)})
    made = plan_transfers(held, weight({4: (0, 8), 6: (0, 8), 7: (0, 8)}), nodes_of(4))
    assert {one.source_gpu for one in made.transfers} == {5}
    assert made.sent_between_nodes_bytes() == {}


def test_owners_share_the_work() -> None:
    """Equal pieces, equal owners: the same number each; inside and between nodes apart."""
    held = weight({0: (0, 8), 1: (0, 8)})
    made = plan_transfers(held, weight(dict.fromkeys(range(2, 10), (0, 8))), nodes_of(4))
    assert Counter(one.source_gpu for one in made.transfers) == {0: 4, 1: 4}
    assert made.sent_between_nodes_bytes() == {0: 3 * 64, 1: 3 * 64}
    assert made.balance([0, 1]) == 1.0
    assert made.balance([0, 1, 2, 3]) == 0.5


def test_senders_are_balanced_as_well_as_can_be() -> None:
    """The busiest sends no more than the best split of all bytes, plus one piece."""
    for seed in range(100):
        held, needed = random_holdings(random.Random(seed))
        node_of = nodes_of(4)
        made = plan_transfers(held, needed, node_of)
        for between in (False, True):
            moves = [one for one in made.transfers if one.between_nodes == between]
            sent = Counter[int]()
            for one in moves:
                sent[one.source_gpu] += one.num_bytes
            choices = Counter[frozenset[int]]()
            for one in moves:
                choices[frozenset(choice(held, one.box, one.key, one.destination_gpu))] += (
                    one.num_bytes
                )
            largest = max((one.num_bytes for one in moves), default=0)
            assert max(sent.values(), default=0) <= best_busiest(choices) + largest, seed


def choice(held: Holdings, box: Box, key: str, gpu: int) -> list[int]:
    """Who could have sent a box: owners of all of it, of the same node where there are any."""
    spans = box.spans
    owners = [
        owner
        for owner, holdings in held.items()
        for holding in holdings
        if holding.key == key
        and all(a <= c and d <= b for (a, b), (c, d) in zip(holding.box.spans, spans, strict=True))
    ]
    return [owner for owner in owners if owner // 4 == gpu // 4] or owners


def best_busiest(choices: Counter[frozenset[int]]) -> float:
    """Bytes of the busiest sender if bytes could be split at will (max-flow min-cut)."""
    gpus = sorted(set().union(*choices)) if choices else []
    subsets = itertools.chain.from_iterable(
        itertools.combinations(gpus, size) for size in range(1, len(gpus) + 1)
    )
    return max(
        (
            sum(num_bytes for owners, num_bytes in choices.items() if owners <= set(subset))
            / len(subset)
            for subset in subsets
        ),
        default=0.0,
    )


def test_an_element_that_nobody_holds_is_named() -> None:
    with pytest.raises(
        MigrationError, match=r"weight at offset \(3, 0\) with shape \(2, 4\).*GPU 2"
    ):
        plan_transfers(weight({0: (0, 3), 1: (5, 8)}), weight({2: (0, 8)}), ONE_NODE)
    with pytest.raises(MigrationError, match=r"No GPU holds weight at offset \(0, 0\)"):
        plan_transfers({}, weight({2: (0, 8)}), ONE_NODE)


def test_tensors_that_are_not_the_same_are_refused() -> None:
    with pytest.raises(MigrationError, match=r"shape \(8, 4\).*on GPU 0.*\(9, 4\).*on GPU 1"):
        plan_transfers(weight({0: (0, 8)}), weight({1: (0, 8)}, rows=9), ONE_NODE)
    with pytest.raises(MigrationError, match=r"offset \(4, 0\) with shape \(5, 4\): outside"):
        plan_transfers(weight({0: (0, 8)}), weight({1: (4, 9)}), ONE_NODE)
    twice = {1: [*weight({1: (0, 8)})[1], *weight({1: (0, 8)})[1]]}
    with pytest.raises(MigrationError, match="GPU 1 has elements of weight twice"):
        plan_transfers(weight({0: (0, 8)}), twice, ONE_NODE)


def test_a_scalar_is_a_tensor_too() -> None:
    step = Holding(
        key="step", global_shape=(), box=Box(offset=(), shape=()), element_bytes=4, name="step"
    )
    made = plan_transfers({0: [step]}, {0: [step], 1: [step]}, ONE_NODE)
    assert made.received_bytes() == {1: 4}
    assert made.transfers[0].source_slices == ()


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_plan_pair_that_one_can_count(tied: bool) -> None:
    """A GPU of the second stage goes to standby; the first one takes all: half of everything."""
    decoder = Decoder(num_layers=4, tied=tied, states=tuple(STATES))
    held = decoder.holdings(nominal(1, 2, 1))
    needed = decoder.holdings(nominal(1, 1, 1))
    per_layer = sum(math.prod(tensor.shape) for tensor in decoder.layer_tensors())
    elements = 2 * per_layer + decoder.hidden + (0 if tied else 16 * decoder.hidden)
    made = plan_transfers(held, needed, ONE_NODE)
    assert made.received_bytes() == {0: elements * sum(STATES.values())}
