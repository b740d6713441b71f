"""Rounds: bounded, complete, the same for both ends, and few."""

import random
from collections import Counter

import numpy as np
import pytest

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding
from malleus_megatron.migration.rounds import cut_into_rounds
from malleus_megatron.migration.transfers import Transfer, plan_transfers
from tests.harness.decoder import Decoder, random_plan
from tests.harness.painting import Truth, move, zeros

NODE_OF = {gpu: gpu // 4 for gpu in range(16)}


def transfer(pair: tuple[int, int], shape: tuple[int, ...], key: str = "w") -> Transfer:
    source, destination = pair
    holding = Holding(
        key=key,
        global_shape=shape,
        box=Box(offset=(0,) * len(shape), shape=shape),
        element_bytes=4,
        name=key,
    )
    return Transfer(
        box=holding.box,
        source_gpu=source,
        source=holding,
        destination_gpu=destination,
        destination=holding,
    )


def some_pair(rng: random.Random) -> tuple[int, int]:
    source, destination = rng.sample(range(6), 2)
    return source, destination


def test_rounds_are_bounded_and_bring_every_element_once() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        decoder = Decoder(num_layers=2, kinds=("qkv", "proj", "fc1"))
        held, needed = (
            decoder.holdings(random_plan(rng, num_gpus=8, num_layers=2)) for _ in range(2)
        )
        made = plan_transfers(held, needed, NODE_OF)
        max_bytes = rng.choice([2, 30, 64, 200, 10**6])
        rounds = cut_into_rounds(made.transfers, max_bytes)
        truth = Truth.of(held, needed)
        old, new, arrived = truth.local(held), zeros(needed), zeros(needed)
        move(made.copies, old, new, arrived)
        for one in rounds:
            assert one.transfers
            sent, received = Counter[int](), Counter[int]()
            for part in one.transfers:
                sent[part.source_gpu] += part.num_bytes
                received[part.destination_gpu] += part.num_bytes
            assert max(*sent.values(), *received.values()) <= max_bytes
            move(one.transfers, old, new, arrived)
        assert all((count == 1).all() for count in arrived.values()), seed
        assert all(np.array_equal(new[name], want) for name, want in truth.local(needed).items())


def test_both_ends_list_what_passes_between_them_in_the_same_order() -> None:
    rng = random.Random(0)
    moves = [transfer(some_pair(rng), (rng.randint(1, 9), 3)) for _ in range(200)]
    rounds = cut_into_rounds(moves, 64)
    assert sum(len(one.transfers) for one in rounds) >= 200
    for one in rounds:
        for a in range(6):
            for b in range(6):
                sends = [move for move in one.sends(a) if move.destination_gpu == b]
                receives = [move for move in one.receives(b) if move.source_gpu == a]
                assert sends == receives


def test_the_order_of_the_input_does_not_matter() -> None:
    rng = random.Random(1)
    moves = [
        transfer(some_pair(rng), (rng.randint(1, 9), 3), key=f"w{number}") for number in range(100)
    ]
    rounds = cut_into_rounds(moves, 64)
    assert cut_into_rounds(rng.sample(moves, 100), 64) == rounds


def test_there_are_few_rounds() -> None:
    """Within the proven bound, for any sizes."""
    for seed in range(100):
        rng = random.Random(seed)
        moves = [transfer(some_pair(rng), (rng.randint(1, 40),)) for _ in range(80)]
        sent, received = Counter[int](), Counter[int]()
        for one in moves:
            sent[one.source_gpu] += one.num_bytes
            received[one.destination_gpu] += one.num_bytes
        max_bytes = rng.choice([40, 100, 160, 400])
        rounds = cut_into_rounds(moves, max_bytes)
        busiest = max(sent[one.source_gpu] + received[one.destination_gpu] for one in moves)
        assert len(rounds) <= 1 + 2 * busiest / max_bytes


def test_all_gpus_are_busy_together() -> None:
    """Everyone sends the same to everyone: not one round more than its bytes need."""
    pairs = [(a, b) for a in range(7) for b in range(7) if a != b]
    rounds = cut_into_rounds([transfer(pair, (16, 4)) for pair in pairs], 256)
    assert len(rounds) == 6
    assert all(len(one.transfers) == 7 for one in rounds)


def test_a_large_transfer_is_cut_along_its_longest_axis() -> None:
    rounds = cut_into_rounds([transfer((0, 1), (3, 10))], 48)
    assert [part.box.shape for one in rounds for part in one.transfers] == [(3, 4), (3, 4), (3, 2)]
    rounds = cut_into_rounds([transfer((0, 1), (3, 5))], 8)
    assert {part.box.shape for one in rounds for part in one.transfers} == {(1, 1), (2, 1)}
    assert sum(part.num_bytes for one in rounds for part in one.transfers) == 60


def test_nothing_to_move_is_no_round() -> None:
    assert cut_into_rounds([], 1) == ()


def test_a_round_smaller_than_an_element_is_refused() -> None:
    with pytest.raises(MigrationError, match="An element of w has 4 bytes; a round may have 3"):
        cut_into_rounds([transfer((0, 1), (2,))], 3)
