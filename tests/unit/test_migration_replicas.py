"""Which copies differ, whose copy counts, and that a repair makes all of them equal."""

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.holdings import Holding, Holdings
from malleus_megatron.migration.owners import Slice
from malleus_megatron.migration.replicas import (
    Difference,
    differences,
    digests,
    disputed_sets,
    in_words,
    owner_sets,
    repairs,
    shared_slices,
)
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.seats import seats
from tests.harness.decoder import Decoder, random_plan
from tests.harness.painting import Arrays, Truth

SEEDS = range(40)


def held(key: str, gpus: Sequence[int], layer: int = 0) -> Holdings:
    """A tensor of four elements in each of two layers, one of which these GPUs hold."""
    one = Holding(
        key=key,
        global_shape=(2, 4),
        box=Box(offset=(layer, 0), shape=(1, 4)),
        element_bytes=4,
        name=f"{key}@{layer}",
    )
    return {gpu: [one] for gpu in gpus}


def of_one_slice(copies: dict[int, int], pipeline_of: dict[int, int]) -> tuple[Difference, ...]:
    """Compare hashes of one slice, by GPU."""
    slices = shared_slices(held("parameter.layers.norm", sorted(copies)))
    rows = [[copies[gpu]] if gpu in copies else [] for gpu in range(max(copies) + 1)]
    return differences(slices, rows, pipeline_of)


@pytest.mark.parametrize(
    ("copies", "gpus", "good", "is_certain"),
    [
        ({1: 7, 2: 7, 4: 9}, (4,), 2, True),
        ({1: 9, 2: 7, 4: 7}, (1,), 4, True),
        ({1: 1, 2: 2, 4: 3}, (1, 2), 4, False),
        ({1: 8, 2: 7}, (1,), 2, False),
        ({1: 8, 2: 7, 3: 8, 4: 7}, (1, 3), 4, False),
        ({0: 5, 1: 5, 2: 3, 3: 4}, (2, 3), 0, False),
        ({0: 5, 3: 6}, (3,), 0, False),
    ],
)
def test_the_majority_is_right_else_the_lowest_pipeline(
    copies: dict[int, int], gpus: tuple[int, ...], good: int, is_certain: bool
) -> None:
    pipeline_of = {0: 1, 1: 2, 2: 1, 3: 1, 4: 0}
    (found,) = of_one_slice(copies, pipeline_of)
    assert (found.gpus, found.good_gpu, found.is_certain) == (gpus, good, is_certain)


def test_equal_copies_are_no_difference() -> None:
    assert of_one_slice({0: 5, 2: 5, 3: 5}, dict.fromkeys(range(4), 0)) == ()
    assert shared_slices(held("parameter.layers.norm", [3])) == ()


@pytest.mark.parametrize(
    ("key", "layer", "state", "parameter"),
    [
        ("parameter.decoder.layers.mlp.weight", 1, "parameter", "decoder.layers.1.mlp.weight"),
        ("exp_avg.decoder.layers.7.mlp.weight", 0, "exp_avg", "decoder.layers.7.mlp.weight"),
        ("main.embedding.weight", 1, "main", "embedding.weight"),
    ],
)
def test_a_difference_names_parameter_and_layer(
    key: str, layer: int, state: str, parameter: str
) -> None:
    slices = shared_slices(held(key, [0, 1, 2], layer))
    (found,) = differences(slices, [[1], [1], [2]], {0: 0, 1: 1, 2: 2})
    assert (found.state, found.parameter) == (state, parameter)
    said = in_words([found, found])
    assert said.startswith("GPU 2 differs from GPU 0, which most owners agree with, in ")
    assert f"{parameter}, elements at [{layer}, 0] with shape [1, 4]" in said
    assert said.endswith(", and 1 more")
    unsure = replace(found, gpus=(1, 2), is_certain=False)
    assert "GPUs 1, 2 differ from GPU 0, which may be the wrong one" in in_words([unsure])


def hashes_of(slices: Sequence[Slice], gpu: int, local: Arrays) -> list[int]:
    """Of the slices that the GPU owns."""
    found = []
    for part in slices:
        if gpu in part.owners:
            holding = part.holding_of(gpu)
            values = local[gpu, holding.name][holding.box.slices_of(part.box)]
            found.append(zlib.crc32(values.tobytes()))
    return found


def compare(slices: Sequence[Slice], local: Arrays, plan: Plan) -> tuple[Difference, ...]:
    """As the ranks of a job do it, in two turns."""
    gpus = range(1 + max(seats(plan)))
    mine = [[part for part in slices if gpu in part.owners] for gpu in gpus]
    hashes = [hashes_of(slices, gpu, local) for gpu in gpus]
    rows = [digests(parts, values) for parts, values in zip(mine, hashes, strict=True)]
    disputed = disputed_sets(owner_sets(slices), rows)
    chosen = [part for part in slices if part.owners in disputed]
    rows = [hashes_of(chosen, gpu, local) for gpu in gpus]
    return differences(chosen, rows, {gpu: seat.pipeline or 0 for gpu, seat in seats(plan).items()})


@pytest.mark.parametrize("seed", SEEDS)
def test_damage_is_found_where_it_is_and_repaired(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, num_gpus=rng.randint(4, 12), num_layers=3)
    holdings = Decoder(num_layers=3, tied=rng.random() < 0.7).holdings(plan)
    slices = shared_slices(holdings)
    local = Truth.of(holdings).local(holdings)
    assert compare(slices, local, plan) == ()
    damaged = rng.sample(slices, min(len(slices), 3))
    expected = {}
    for part in damaged:
        gpu = rng.choice(part.owners)
        holding = part.holding_of(gpu)
        values = local[gpu, holding.name][holding.box.slices_of(part.box)]
        values.flat[rng.randrange(values.size)] += 1
        expected[part] = gpu
    found = compare(slices, local, plan)
    assert {one.slice for one in found} == set(damaged)
    for one in found:
        assert expected[one.slice] in (*one.gpus, one.good_gpu)
        if len(one.slice.owners) > 2:
            assert (one.gpus, one.is_certain) == ((expected[one.slice],), True)
    for move in repairs(found):
        source = local[move.source_gpu, move.source.name][move.source_slices]
        local[move.destination_gpu, move.destination.name][move.destination_slices] = source
    assert compare(slices, local, plan) == ()


def test_all_owners_of_a_uniform_job_are_compared() -> None:
    plan = nominal_plan(
        num_layers=4,
        num_microbatches=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
    )
    slices = shared_slices(Decoder(num_layers=4).holdings(plan))
    shared = {(0, 2), (1, 3), (4, 6), (5, 7)}
    whole = {(0, 1, 2, 3), (4, 5, 6, 7)}
    tied = {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert set(owner_sets(slices)) == shared | whole | tied
    for part in slices:
        is_whole = "norm" in part.key or part.key in ("layers.proj.bias", "layers.fc2.bias")
        sets = whole if is_whole else tied if part.key == "embedding" else shared
        assert part.owners in sets, part.key
