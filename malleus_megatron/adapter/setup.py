"""Making the job: level, nominal plan, user's files, clock, reporter. Errors reach all ranks."""

import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args
from megatron.training.utils import print_rank_0

from malleus_megatron.adapter.inputs import Inputs, check_alike, check_plans, read_inputs
from malleus_megatron.adapter.job import Job
from malleus_megatron.adapter.layers import layers_of
from malleus_megatron.adapter.levels import (
    LevelDecision,
    check_required,
    decide_level,
    without_reshape,
)
from malleus_megatron.adapter.memory import StepMemory, job_memory, memory_limit
from malleus_megatron.adapter.plan_changes import PlanChanges
from malleus_megatron.adapter.probes import Probes
from malleus_megatron.adapter.replica_check import ReplicaCheck
from malleus_megatron.adapter.report import Reporter
from malleus_megatron.adapter.reshape.ground import Ground, is_gpt, lay_ground
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.adapter.saves import plan_to_resume
from malleus_megatron.adapter.scalars import Scalars
from malleus_megatron.adapter.trace import JobTrace, no_trace_of
from malleus_megatron.config import Level, MalleusConfig
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.control.memory import JobMemory
from malleus_megatron.control.values import Freedom, JobDescription
from malleus_megatron.errors import MalleusError, MigrationError
from malleus_megatron.events import EventLog
from malleus_megatron.plan.nominal import Cell, grid_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.telemetry import Telemetry
from malleus_megatron.sidecar.client import make_sidecar, start_sidecar


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetup:
    """What is known before the model is built."""

    config: MalleusConfig
    agreement: Agreement
    decision: LevelDecision
    inputs: Inputs
    events: EventLog | None
    """On rank 0, open already, so that a folder that cannot be written is found at once."""
    containers: Any
    """Megatron's configuration of the whole job, where the script made one."""
    collection: Any
    """Megatron's process groups, as `pretrain` hands them on."""


def begin_setup(config: MalleusConfig, containers: Any, collection: Any) -> JobSetup:
    """Decide the level and read the user's files; a collective.

    Args:
        config: The plugin's settings.
        containers: Megatron's configuration of the job; None where the script builds its model.
        collection: Megatron's process groups.

    Raises:
        MalleusError: on all ranks together, whichever rank met it.
    """
    args = get_args()
    agreement = Agreement(timedelta(minutes=args.distributed_timeout_minutes))
    decision = decide_level(args, own_model=not is_gpt(containers))
    inputs = events = None
    error = None
    try:
        check_required(decision, config.require)
        if agreement.rank == 0:
            make_sidecar(config)
        inputs = read_inputs(config, agreement.world_size)
        events = EventLog(config.log_dir) if agreement.rank == 0 else None
    except MalleusError as met:
        error = met
    agreement.raise_together(error)
    assert inputs is not None
    check_alike(inputs, config, agreement)
    return JobSetup(
        config=config,
        agreement=agreement,
        decision=decision,
        inputs=inputs,
        events=events,
        containers=containers,
        collection=collection,
    )


def finish_setup(setup: JobSetup, built: tuple[list[Any], Any, Any]) -> Job:
    """Make the job around the built model; a collective.

    Args:
        setup: From `begin_setup`.
        built: Megatron's model chunks of this rank, their optimizer and its scheduler.

    Raises:
        MalleusError: on all ranks together.
    """
    layers = layers_of(built[0])
    nominal = _nominal(setup.agreement, len(layers))
    ground = memory = None
    if setup.decision.level >= Level.reshape:
        try:
            ground = _ground(setup, built)
            memory = _memory(setup, ground, nominal)
        except MigrationError as reason:
            ground = None
            setup = replace(setup, decision=without_reshape(get_args(), str(reason)))
    widths = None if ground is None else ground.widths
    current = CurrentPlan(nominal, setup.decision.level, widths)
    clock = reporter = error = None
    try:
        check_required(setup.decision, setup.config.require)
        check_plans(setup.inputs, current, get_args(), memory)
        clock = _clock(setup, layers, built[0])
        freedom = None if ground is None else _limited(ground.freedom, memory)
        if setup.events is not None:
            reporter = _reporter(setup, current, freedom, setup.events)
    except MalleusError as met:
        error = met
    setup.agreement.raise_together(error)
    assert clock is not None
    switch = None if ground is None else ground.switch
    changes = PlanChanges(
        agreement=setup.agreement,
        current=current,
        reporter=reporter,
        switch=switch,
        pace=setup.inputs.pace,
    )
    changes.memory = memory
    job = Job(
        pipeline=mpu.get_data_parallel_rank(),
        agreement=setup.agreement,
        changes=changes,
        inputs=_with_resumed_plan(setup, changes),
        clock=clock,
        replicas=_replica_check(setup, built, switch, reporter),
    )
    if ground is not None:
        if memory is not None:
            job.step_memory = StepMemory(ground.switch)
        _learn(job.probes, reporter)
    job.telemetry = _telemetry()
    job.scalars = Scalars() if Scalars.are_wanted() else None
    job.trace = _trace(setup, clock.device, reporter)
    return job


def _learn(probes: Probes, reporter: Reporter | None) -> None:
    try:
        probes.learn()
    except MigrationError as reason:
        if reporter is not None:
            reporter.warning(f"GPUs on standby are not probed, and stay there: {reason}")


def _ground(setup: JobSetup, built: tuple[list[Any], Any, Any]) -> Ground:
    return lay_ground(
        setup.agreement,
        setup.containers,
        setup.collection,
        built,
        setup.inputs.pace,
        migration_mib=setup.config.migration_memory,
    )


def _with_resumed_plan(setup: JobSetup, changes: PlanChanges) -> Inputs:
    """The user's files; where they name no plan to start under, that of the checkpoint."""
    inputs = setup.inputs
    if inputs.plan_at(get_args().iteration + 1, first=True) is not None:
        return inputs
    return replace(inputs, resumed_plan=plan_to_resume(setup.agreement, changes))


def _replica_check(
    setup: JobSetup,
    built: tuple[list[Any], Any, Any],
    switch: Switch | None,
    reporter: Reporter | None,
) -> ReplicaCheck | None:
    """None where it is off: as asked, or in a recipe whose owners may not be known."""
    if not setup.config.check_replicas:
        return None
    if setup.decision.level < Level.rebalance:
        if reporter is not None:
            reporter.note("replicas are not compared at level observe")
        return None
    return ReplicaCheck(
        setup.config, agreement=setup.agreement, built=built, switch=switch, reporter=reporter
    )


def _telemetry() -> Telemetry | None:
    """Reads beside the training what the driver says of this rank's GPU; None in CPU mode."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    telemetry = Telemetry(f"GPU-{getattr(device, 'uuid', 'unknown to this torch')}")
    telemetry.start()
    return telemetry


def _trace(setup: JobSetup, device: torch.device, reporter: Reporter | None) -> JobTrace | None:
    """None where it is off: as asked, or in a recipe that cannot be traced."""
    config = setup.config
    if not config.trace or config.log_dir is None:
        return None
    reason = no_trace_of(get_args())
    if reason is not None:
        if reporter is not None:
            reporter.warning(f"--malleus-trace: nothing is traced: {reason}.")
        return None
    hosts = setup.agreement.gather(socket.gethostname().encode())
    writer = None
    if reporter is not None:  # pyarrow is not loaded where nothing is written
        from malleus_megatron.adapter.trace_writer import TraceWriter

        nodes = {gpu: hosts.index(host) for gpu, host in enumerate(hosts)}
        writer = TraceWriter(config.log_dir / "trace", reporter, nodes)
    return JobTrace(
        config.trace,
        agreement=setup.agreement,
        device=device,
        writer=writer,
    )


def _memory(setup: JobSetup, ground: Ground, nominal: Plan) -> JobMemory | None:
    """Of a job whose plans are limited by memory; a collective."""
    limit = memory_limit(setup.agreement, setup.config.memory)
    if limit is None:
        return None
    largest_tp = ground.freedom.tensor_parallel_sizes[-1]
    return job_memory(setup.agreement, ground.switch, nominal, limit, largest_tp=largest_tp)


def _limited(freedom: Freedom, memory: JobMemory | None) -> Freedom:
    if memory is None:
        return freedom
    cluster = replace(freedom.cluster, memory_mib=memory.limit.memory_mib)
    return replace(freedom, cluster=cluster, memory=memory.model)


def _nominal(agreement: Agreement, num_layers: int) -> Plan:
    """The grid that Megatron has made, whatever its rank order; virtual stages are summed up."""
    rows = agreement.exchange(
        [
            mpu.get_data_parallel_rank(),
            mpu.get_pipeline_model_parallel_rank(),
            mpu.get_tensor_model_parallel_rank(),
            num_layers,
        ]
    )
    cells = [
        Cell(
            gpu=gpu,
            pipeline=int(row[0]),
            stage=int(row[1]),
            tp_rank=int(row[2]),
            num_layers=int(row[3]),
        )
        for gpu, row in enumerate(rows)
    ]
    pipelines = 1 + max(cell.pipeline for cell in cells)
    return grid_plan(cells, get_num_microbatches() * pipelines)


def _clock(setup: JobSetup, layers: list[Any], model: list[Any]) -> LayerClock:
    clock = LayerClock(
        gpu=setup.agreement.rank,
        device=_device_of(model),
        pace=setup.inputs.pace,
        injection=setup.inputs.injection,
    )
    if getattr(get_args(), "cuda_graph_impl", "none") != "none":
        layers = []  # events that are recorded into a graph cannot be read
    clock.attach(layers, tp_degree=mpu.get_tensor_model_parallel_world_size())
    return clock


def _device_of(model: list[Any]) -> torch.device:
    """Where a rank computes: a stage without layers, of embedding or loss alone, does so too."""
    on_gpu = any(parameter.is_cuda for chunk in model for parameter in chunk.parameters())
    return torch.device("cuda" if on_gpu else "cpu")


def _reporter(
    setup: JobSetup, current: CurrentPlan, freedom: Freedom | None, events: EventLog
) -> Reporter:
    """On rank 0. The sidecar is started in the background, so that nothing waits for it."""
    job = JobDescription(nominal=current.nominal, level=current.level, freedom=freedom)
    reporter = Reporter(
        events=events,
        say=lambda line: print_rank_0(f"malleus: {line}"),
        sidecar=start_sidecar(setup.config, job),
        freedom=freedom,
    )
    reporter.level(current, setup.decision.reason, 0)
    if setup.inputs.injection is not None:
        reporter.injected(setup.inputs.injection)
    return reporter
