"""Batches: complete, within a limit that is not too low, and no old block leaves too early."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.batches import (
    Sequences,
    bytes_by_block,
    cut_into_batches,
    in_sequence,
    least_peaks,
    one_batch,
)
from malleus_megatron.migration.holdings import Holding, Holdings
from malleus_megatron.migration.memory import MIB, Building, Course, Side, choose_course
from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.rounds import cut_into_rounds
from malleus_megatron.migration.shards import ShardGroup, shard_holdings
from malleus_megatron.migration.transfers import TransferPlan, plan_transfers
from tests.harness.decoder import Decoder, random_plan
from tests.harness.painting import Truth, zeros

NODE_OF = {gpu: gpu // 4 for gpu in range(8)}
KINDS = ("main", "exp_avg", "exp_avg_sq")
ROUND = 64


def state(seed: int, *, hidden: int = 8, buffer_bytes: int = 100) -> Holdings:
    """Parameters of a random plan, and the optimizer's shares of them."""
    decoder = Decoder(num_layers=4, hidden=hidden, kinds=("qkv", "proj", "norm_1"))
    plan = random_plan(random.Random(seed), num_gpus=8, num_layers=4)
    parameters = {
        gpu: [replace(one, block="parameter") for one in held]
        for gpu, held in decoder.holdings(plan).items()
    }
    groups = [ShardGroup(group=group) for group in reduction_groups(parameters, buffer_bytes)]
    kept = shard_holdings(groups, KINDS, 4, "")
    return {gpu: [*held, *kept.get(gpu, ())] for gpu, held in parameters.items()}


def sequences_of(seed: int) -> tuple[TransferPlan, Sequences, Holdings, Holdings]:
    held, needed = state(seed), state(seed + 1000)
    moves = plan_transfers(held, needed, NODE_OF)
    old, new = bytes_by_block(held), bytes_by_block(needed)
    order = in_sequence(moves, needed, old=old, new=new, first="parameter")
    return moves, order, held, needed


def blocks_of(holdings: Holdings) -> dict[tuple[int, str], str]:
    return {(gpu, one.name): one.block for gpu, held in holdings.items() for one in held}


@pytest.mark.parametrize("seed", range(12))
def test_batches_bring_everything_and_nothing_is_read_that_has_left(seed: int) -> None:
    _, order, held, needed = sequences_of(seed)
    least = least_peaks(order)
    rng = random.Random(seed)
    limits = {gpu: int(peak * rng.choice([0.5, 1.0, 1.2, 10])) for gpu, peak in least.items()}
    batches = cut_into_batches(order, limits, ROUND)
    truth = Truth.of(held, needed)
    old, new, arrived = truth.local(held), zeros(needed), zeros(needed)
    block_of = blocks_of(needed), blocks_of(held)
    present = {gpu: order.present_bytes(gpu) for gpu in least}
    there = {(gpu, "parameter") for gpu in needed}
    for batch in batches:
        for gpu, names in batch.comes.items():
            there |= {(gpu, name) for name in names}
            present[gpu] += sum(order.new[gpu][name] for name in names)
        for gpu, peak in least.items():
            assert present[gpu] <= max(peak, limits[gpu]), f"GPU {gpu}"
        rounds = [move for one in batch.rounds for move in one.transfers]
        for move in (*batch.copies, *rounds):
            target = move.destination_gpu, move.destination.name
            assert (target[0], block_of[0][target]) in there
            source = old[move.source_gpu, move.source.name]
            new[target][move.destination_slices] = source[move.source_slices]
            arrived[target][move.destination_slices] += 1
        left = {(gpu, name) for gpu, names in batch.leaves.items() for name in names}
        old = {place: a for place, a in old.items() if (place[0], block_of[1][place]) not in left}
        for gpu, name in left:
            present[gpu] -= order.old[gpu][name]
    assert old == {}, "some old state is never given back"
    assert all((count == 1).all() for count in arrived.values())
    wanted = truth.local(needed)
    assert all((new[place] == array).all() for place, array in wanted.items())


def test_the_tighter_the_limit_the_more_batches_and_never_more_bytes() -> None:
    moves, order, _, _ = sequences_of(5)
    least = least_peaks(order)
    whole = cut_into_batches(order, dict.fromkeys(least, 10**9), ROUND)
    tight = cut_into_batches(order, least, ROUND)
    assert len(whole) == 1
    assert len(tight) > 3
    wanted = Counter(moves.received_bytes())
    for batches in (whole, tight, one_batch(moves, ROUND)):
        received: Counter[int] = Counter()
        for batch in batches:
            for a_round in batch.rounds:
                for move in a_round.transfers:
                    received[move.destination_gpu] += move.num_bytes
        assert received == wanted


def test_giving_back_needs_less_than_keeping_both() -> None:
    """About one share beside the parameters, where all of the new state would come on top."""
    _, order, _, _ = sequences_of(3)
    both = {
        gpu: sum(order.old.get(gpu, {}).values()) + sum(order.new.get(gpu, {}).values())
        for gpu in NODE_OF
    }
    least = least_peaks(order)
    assert max(least.values()) < 0.7 * max(both.values())


def test_the_order_of_holdings_does_not_matter() -> None:
    moves, order, _, needed = sequences_of(2)
    turned = {gpu: list(reversed(needed[gpu])) for gpu in sorted(needed, reverse=True)}
    again = in_sequence(moves, turned, old=order.old, new=order.new, first="parameter")
    assert again.order == order.order


SIZES = (MIB, 4 * MIB)
BUILDING = Building(parameters="parameter", copies_parameters=False)


def course_under(bound_mib: float, seed: int = 1) -> Course:
    held = state(seed, hidden=512, buffer_bytes=MIB)
    needed = state(seed + 1000, hidden=512, buffer_bytes=MIB)
    moves = plan_transfers(held, needed, NODE_OF)

    def side(holdings: Holdings) -> Side:
        gradients = {
            gpu: sum(2 * one.num_bytes for one in of if one.block == "parameter")
            for gpu, of in holdings.items()
        }
        return Side(blocks=bytes_by_block(holdings), gradients=gradients)

    return choose_course(
        moves,
        needed,
        sides=(side(held), side(needed)),
        building=BUILDING,
        bound_bytes=int(bound_mib * MIB),
        max_messages=SIZES,
    )


def test_the_bound_that_a_refusal_names_would_do_and_one_less_would_not() -> None:
    with pytest.raises(MigrationError, match="--malleus-migration-memory allows 1 MiB") as refusal:
        course_under(1)
    with pytest.raises(
        MigrationError, match=r"allows 1\.01 MiB\. Give it as much, or leave it out"
    ):
        course_under(1.01)
    words = str(refusal.value).split()
    both, least = [int(words[n - 1]) for n, word in enumerate(words) if word == "MiB"][:2]
    assert 1 < least < both
    assert course_under(least).frees
    with pytest.raises(MigrationError):
        course_under(least - 1)
    assert not course_under(both).frees
    assert course_under(both - 1).frees


def test_rounds_shrink_with_the_bound() -> None:
    """A quarter of it at most is in messages, of which a round has a quarter."""
    for bound_mib in (10, 40):
        for batch in course_under(bound_mib).batches:
            for a_round in batch.rounds:
                sent: Counter[int] = Counter()
                for move in a_round.transfers:
                    sent[move.source_gpu] += move.num_bytes
                assert max(sent.values()) <= min(SIZES[0], bound_mib * MIB // 16)


def test_the_load_of_a_round_is_that_of_the_busiest_gpu() -> None:
    def holding(key: str) -> Holding:
        box = state(1)[0][0].box
        return replace(state(1)[0][0], key=key, name=key, box=box)

    one = holding("w")
    held: Holdings = {0: [one]}
    needed: Holdings = {gpu: [one] for gpu in (1, 2, 5)}
    moves = plan_transfers(held, needed, NODE_OF)
    (a_round,) = cut_into_rounds(moves.transfers, 10**6)
    assert a_round.load.inside_bytes == 2 * one.num_bytes
    assert a_round.load.between_bytes == one.num_bytes
