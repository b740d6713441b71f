"""How long it takes to plan a migration of a large job."""

import random
import time
from dataclasses import replace

import pytest

from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.rounds import cut_into_rounds
from malleus_megatron.migration.transfers import plan_transfers
from tests.harness.decoder import STATES, Decoder, random_plan

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]


def seconds(num_layers: int) -> tuple[float, float, float]:
    """CPU time of transfers, rounds and groups: 64 GPUs, 12 tensors a layer, 4 states."""
    gradients = Decoder(
        num_layers=num_layers,
        hidden=8192,
        query_groups=1024,
        ffn=28672,
        vocabulary=128256,
        tied=False,
    )
    decoder = replace(gradients, states=tuple(STATES))
    rng = random.Random(0)
    first, second = (
        random_plan(rng, num_gpus=64, num_layers=num_layers, degrees=(2, 4, 8)) for _ in range(2)
    )
    held, needed = decoder.holdings(first), decoder.holdings(second)
    summed = gradients.holdings(second)
    node_of = {gpu: gpu // 8 for gpu in range(64)}
    times = [time.process_time()]
    made = plan_transfers(held, needed, node_of)
    times.append(time.process_time())
    cut_into_rounds(made.transfers, 2**28)
    times.append(time.process_time())
    reduction_groups(summed, 40 * 2**20)
    times.append(time.process_time())
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def test_planning_time_grows_like_the_number_of_tensors() -> None:
    """Four times the layers: about four times the time, not sixteen."""
    small, large = seconds(20), seconds(80)
    print(f"80 layers: transfers, rounds, groups in {large} s; 20 layers in {small} s")
    assert sum(large) < 10 * sum(small)
