"""How long it takes to plan a migration of a large job."""

import random
import time
from dataclasses import replace

import pytest

from malleus_megatron.migration.holdings import Holding
from malleus_megatron.migration.owners import reduction_groups
from malleus_megatron.migration.rounds import cut_into_rounds
from malleus_megatron.migration.shards import ShardGroup, shard_holdings
from malleus_megatron.migration.transfers import plan_transfers
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
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


WIDE = Decoder(
    num_layers=20, hidden=8192, query_groups=1024, ffn=28672, vocabulary=128256, tied=False
)


def with_shares(plan: Plan) -> dict[int, list[Holding]]:
    """Parameters, and the optimizer's state in shares of their owners."""
    held = WIDE.holdings(plan)
    groups = [ShardGroup(group=group) for group in reduction_groups(held, 2**27)]
    shares = shard_holdings(groups, ("main", "exp_avg", "exp_avg_sq"), 4, "")
    return {gpu: [*whole, *shares.get(gpu, ())] for gpu, whole in held.items()}


def halved(plan: Plan) -> Plan:
    """One pipeline's first stage on half of its GPUs, with fewer layers."""
    first, *others = plan.pipelines
    gpus = first.stages[0].gpus
    bounds = (0, 3, 8, 14, 20)
    stages = [
        replace(stage, layers=(start, end))
        for stage, start, end in zip(first.stages, bounds, bounds[1:], strict=False)
    ]
    stages[0] = replace(stages[0], gpus=gpus[: len(gpus) // 2])
    pipelines = (replace(first, stages=tuple(stages)), *others)
    return replace(plan, pipelines=pipelines, standby=gpus[len(gpus) // 2 :])


def seconds_of_a_switch(data_parallel_size: int) -> float:
    """CPU time of shares, transfers and rounds: TP 8, 4 stages, both plans' state in shares."""
    plan = nominal_plan(
        num_layers=20,
        num_microbatches=4 * data_parallel_size,
        tensor_parallel_size=8,
        pipeline_parallel_size=4,
        data_parallel_size=data_parallel_size,
    )
    begun = time.process_time()
    held, needed = with_shares(plan), with_shares(halved(plan))
    node_of = {gpu: gpu // 8 for gpu in range(32 * data_parallel_size)}
    made = plan_transfers(held, needed, node_of)
    cut_into_rounds(made.transfers, 2**28)
    return time.process_time() - begun


def test_planning_time_grows_like_the_number_of_gpus() -> None:
    """Four times the GPUs: about four times the time, not sixteen."""
    small, middle, large = map(seconds_of_a_switch, (4, 8, 16))
    print(f"shares, transfers, rounds: 128, 256, 512 GPUs in {small}, {middle}, {large} s")
    assert large < 6 * small
