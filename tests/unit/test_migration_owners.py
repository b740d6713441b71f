"""Sums over slice owners against dense sums, and an order in which nobody waits for ever."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding
from malleus_megatron.migration.owners import OwnerGroup, owner_slices, reduction_groups
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.seats import seats
from tests.harness.decoder import Decoder, random_plan
from tests.harness.painting import Arrays, Truth, local_slices, zeros

Tensors = dict[str, NDArray[np.int64]]


def random_case(seed: int) -> tuple[Decoder, Plan, int]:
    rng = random.Random(seed)
    decoder = Decoder(num_layers=rng.randint(1, 3), tied=rng.random() < 0.7)
    num_gpus = rng.randint(4, 12)
    plan = random_plan(rng, num_gpus=num_gpus, num_layers=decoder.num_layers)
    return decoder, plan, rng.choice([16, 200, 10**6])


def gradients(decoder: Decoder, plan: Plan, seed: int) -> tuple[Arrays, Tensors]:
    """Local gradients as backward passes leave them, and what their sums must be.

    Every pipeline has a gradient of its own. A tied copy on a last stage has a part of it that is
    not in the first stage's.
    """
    holdings, rng = decoder.holdings(plan), np.random.default_rng(seed)
    shapes = {key: tensor.shape for key, tensor in Truth.of(holdings).tensors.items()}
    local, sums = zeros(holdings), {key: np.zeros(shape, int) for key, shape in shapes.items()}
    for pipeline in range(len(plan.pipelines)):
        for is_tied_copy in (False, True):
            whole = {key: rng.integers(1, 1000, shape) for key, shape in shapes.items()}
            for seat in seats(plan).values():
                for holding in holdings[seat.gpu] if seat.pipeline == pipeline else ():
                    tied_copy = holding.key == "embedding" and holding.depth > 0
                    if tied_copy == is_tied_copy:
                        where = local_slices(holding)
                        local[seat.gpu, holding.name][...] = whole[holding.key][where]
            has_copy = decoder.tied and len(plan.pipelines[pipeline].stages) > 1
            for key in shapes:
                if not is_tied_copy or (key == "embedding" and has_copy):
                    sums[key] += whole[key]
    return local, sums


def reduce(groups: Sequence[OwnerGroup], local: Arrays) -> None:
    """What the owners of each group do: fill a buffer, all-reduce, take the result."""
    for group in groups:
        buffers = np.zeros((len(group.owners), group.num_elements), dtype=np.int64)
        for row, gpu in enumerate(group.owners):
            for place in group.placements(gpu):
                if place.contributes:
                    part = local[gpu, place.holding.name][place.slices]
                    buffers[row, place.start : place.end] = part.ravel()
        result = buffers.sum(axis=0)
        for gpu in group.owners:
            for place in group.placements(gpu):
                target = local[gpu, place.holding.name][place.slices]
                target[...] = result[place.start : place.end].reshape(target.shape)


def test_all_owners_end_with_the_dense_sum() -> None:
    for seed in range(100):
        decoder, plan, max_bytes = random_case(seed)
        local, sums = gradients(decoder, plan, seed)
        holdings = decoder.holdings(plan)
        reduce(reduction_groups(holdings, max_bytes), local)
        for gpu, held in holdings.items():
            for holding in held:
                expected = sums[holding.key][local_slices(holding)]
                assert np.array_equal(local[gpu, holding.name], expected), (seed, holding)


def test_slices_cover_every_local_tensor_once() -> None:
    for seed in range(100):
        decoder, plan, _ = random_case(seed)
        holdings = decoder.holdings(plan)
        covered = zeros(holdings)
        for part in owner_slices(holdings):
            assert list(part.owners) == sorted(set(part.owners))
            for gpu in part.owners:
                holding = part.holding_of(gpu)
                covered[gpu, holding.name][holding.box.slices_of(part.box)] += 1
        assert all((count == 1).all() for count in covered.values()), seed


def test_blocking_collectives_run_to_the_end_on_all_gpus() -> None:
    """Each GPU has one queue; a sum runs when all its owners have it in front."""
    for seed in range(100):
        decoder, plan, max_bytes = random_case(seed)
        groups = reduction_groups(decoder.holdings(plan), max_bytes)
        queues = {
            gpu: [number for number, group in enumerate(groups) if gpu in group.owners]
            for gpu in plan.all_gpus()
        }
        while any(queues.values()):
            fronts = {queue[0] for queue in queues.values() if queue}
            ready = [
                number
                for number in fronts
                if all(queues[gpu][0] == number for gpu in groups[number].owners)
            ]
            assert ready, f"seed {seed}: all wait"
            for number in ready:
                for gpu in groups[number].owners:
                    queues[gpu].pop(0)


def test_any_two_gpus_meet_in_the_same_order() -> None:
    decoder, plan, max_bytes = random_case(3)
    groups = reduction_groups(decoder.holdings(plan), max_bytes)
    turned = dict(reversed(list(decoder.holdings(plan).items())))
    assert reduction_groups(turned, max_bytes) == groups


def test_the_deepest_groups_come_first_and_fit_their_bound() -> None:
    for seed in range(50):
        decoder, plan, max_bytes = random_case(seed)
        groups = reduction_groups(decoder.holdings(plan), max_bytes)
        depths = [group.slices[-1].depth for group in groups]
        assert depths == sorted(depths, reverse=True)
        for group in groups:
            num_bytes = group.num_elements * group.element_bytes
            assert num_bytes <= max_bytes or len(group.slices) == 1
            assert {part.owners for part in group.slices} == {group.owners}
        for owners in {group.owners for group in groups}:
            alike = [group for group in groups if group.owners == owners]
            for first, second in itertools.pairwise(alike):
                one_more = first.num_elements + second.slices[0].box.num_elements
                assert one_more * first.element_bytes > max_bytes


def test_unlike_tp_degrees_share_by_the_finest_cut() -> None:
    """TP 4 beside TP 1: four sets of two for what is cut, one set of five for what is not."""
    stages = Stage(gpus=(0, 1, 2, 3), layers=(0, 1)), Stage(gpus=(4,), layers=(0, 1))
    plan = Plan(
        num_layers=1,
        num_microbatches=2,
        pipelines=tuple(Pipeline(num_microbatches=1, stages=(stage,)) for stage in stages),
    )
    groups = reduction_groups(Decoder(num_layers=1).holdings(plan), 10**9)
    owners = sorted(group.owners for group in groups)
    assert owners == [(0, 1, 2, 3, 4), (0, 4), (1, 4), (2, 4), (3, 4)]
    replicated = next(group for group in groups if len(group.owners) == 5)
    assert {part.contributors for part in replicated.slices} == {(0, 4)}


def test_a_tied_copy_is_one_more_owner_and_contributor() -> None:
    plan = nominal_plan(
        num_layers=2,
        num_microbatches=2,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        data_parallel_size=2,
    )
    (embedding,) = (
        part
        for part in owner_slices(Decoder(num_layers=2).holdings(plan))
        if part.key == "embedding"
    )
    assert embedding.owners == embedding.contributors == (0, 1, 2, 3)
    assert embedding.depth == 0


def holding(start: int, end: int, **changes: int | str) -> Holding:
    made = Holding(
        key="w",
        global_shape=(8,),
        box=Box(offset=(start,), shape=(end - start,)),
        element_bytes=4,
        name=f"w{start}",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_an_element_that_a_gpu_has_twice_is_refused() -> None:
    with pytest.raises(MigrationError, match=r"GPU 1 has elements of w twice: in w2"):
        owner_slices({1: [holding(0, 4), holding(2, 6)]})
    with pytest.raises(MigrationError, match="GPU 1 has elements of w twice"):
        owner_slices({1: [holding(0, 4), holding(0, 4)]})


def test_a_slice_that_nobody_adds_to_is_refused() -> None:
    with pytest.raises(MigrationError, match=r"w at offset \(0,\).*GPUs \[1, 2\].*replica 0"):
        owner_slices({1: [holding(0, 8, replica=1)], 2: [holding(0, 8, replica=1)]})
