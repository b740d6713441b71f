"""What a job needs before it can be reshaped, worked out once at start."""

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron.core import mpu
from megatron.training import get_args
from megatron.training.models.gpt import GPTModelConfig

from malleus_megatron.adapter.reshape.stage import StageBuilder
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.control.values import Freedom
from malleus_megatron.errors import MigrationError
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.degrees import ModelWidths
from malleus_megatron.plan.pace import Pace
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Everything for reshaping one job."""

    switch: Switch
    freedom: Freedom
    """What a planner may do."""
    widths: ModelWidths
    """What a plan must divide."""


def is_gpt(containers: Any) -> bool:
    """Whether the script leaves building the model to Megatron's GPT configuration."""
    return type(getattr(containers, "model", None)) is GPTModelConfig


def lay_ground(
    agreement: Agreement,
    containers: Any,
    collection: Any,
    built: tuple[list[Any], Any, Any],
    pace: Pace | None,
    *,
    migration_mib: float | None = None,
) -> Ground:
    """Look at what Megatron has built; a collective.

    Args:
        agreement: The ranks' control channel.
        containers: Megatron's configuration of the job.
        collection: Megatron's process groups.
        built: Model chunks, optimizer, scheduler.
        pace: Layer times of a paced run; only its degrees can be run.
        migration_mib: Bound on a switch's memory; None: none.

    Raises:
        MigrationError: on all ranks, if some rank's state cannot be described.
    """
    tp_degree = mpu.get_tensor_model_parallel_world_size()
    builder = StageBuilder(
        containers,
        collection,
        tp_degree=tp_degree,
        num_pipelines=mpu.get_data_parallel_world_size(),
    )
    hosts = [host.decode() for host in agreement.gather(socket.gethostname().encode())]
    nodes = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    node_of = {gpu: nodes[host] for gpu, host in enumerate(hosts)}
    switch = Switch(
        builder=builder,
        agreement=agreement,
        groups=Groups(timedelta(minutes=get_args().distributed_timeout_minutes)),
        built=built,
        node_of=node_of,
        bound_bytes=None if migration_mib is None else int(migration_mib * 2**20),
    )
    agreement.together("describing the model's state", switch.check)
    widths = _widths(builder.padded_vocab_size)
    gpus_per_node = _gpus_per_node([node_of[gpu] for gpu in sorted(node_of)])
    degrees = _degrees(widths, max(gpus_per_node), pace) or (tp_degree,)
    return Ground(
        switch=switch,
        widths=widths,
        freedom=Freedom(
            cluster=Cluster(gpus_per_node=gpus_per_node),
            tensor_parallel_sizes=degrees,
            layer_time_s=() if pace is None else _layer_times(pace, degrees),
        ),
    )


def _widths(padded_vocab_size: int) -> ModelWidths:
    args = get_args()
    return ModelWidths(
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups
        if args.group_query_attention
        else args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        padded_vocab_size=padded_vocab_size,
        seq_length=args.seq_length if args.sequence_parallel else None,
    )


def _gpus_per_node(nodes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the runs of ranks on one node.

    Raises:
        MigrationError: a node's ranks do not follow each other.
    """
    runs = [(node, len(list(run))) for node, run in itertools.groupby(nodes)]
    if len(runs) != len({node for node, _ in runs}):
        raise MigrationError("the ranks of a node do not follow each other")
    return tuple(size for _, size in runs)


def _degrees(widths: ModelWidths, largest: int, pace: Pace | None) -> tuple[int, ...]:
    """Powers of two, as GPUs are linked, that divide the model and that a paced run can hold."""
    known = None if pace is None else {degree for degree, _ in pace.by_degree}
    powers = itertools.takewhile(lambda power: power <= largest, (2**n for n in itertools.count()))
    return tuple(
        degree for degree in powers if widths.allows(degree) and (known is None or degree in known)
    )


def _layer_times(pace: Pace, degrees: Sequence[int]) -> tuple[tuple[int, float], ...]:
    return tuple(
        (degree, times.forward_s + times.backward_s)
        for degree, times in pace.by_degree
        if degree in degrees
    )
