"""The files that a user gave, read once and checked against the job before training starts."""

from dataclasses import dataclass
from typing import Any

from malleus_megatron.config import MalleusConfig
from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.control.memory import JobMemory
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import read_plan
from malleus_megatron.plan.injection import Injection, read_injection
from malleus_megatron.plan.pace import Pace, read_pace
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.render import gpu_ranges
from malleus_megatron.plan.schedule import PlanSchedule, read_schedule
from malleus_megatron.runtime.agreement import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the files say; absent files leave the defaults."""

    start_plan: Plan | None
    schedule: PlanSchedule
    injection: Injection | None
    pace: Pace | None
    resumed_plan: Plan | None = None
    """What was kept with the checkpoint that the job goes on from."""

    def plan_at(self, iteration: int, *, first: bool) -> Plan | None:
        """The plan that the files ask for at the start of this iteration, if any.

        Args:
            iteration: From 1.
            first: The first iteration of this process: a resumed job starts under the plan that
                held when it stopped.
        """
        if first:
            return self.schedule.in_force(iteration) or self.start_plan or self.resumed_plan
        return self.schedule.at(iteration)


def read_inputs(config: MalleusConfig, world_size: int) -> Inputs:
    """Read every file that the flags name.

    Raises:
        BadInputError: a file that cannot be read or holds a wrong value.
    """
    injection = None if config.inject is None else read_injection(config.inject)
    if injection is not None:
        injection.check_gpus(world_size)
    return Inputs(
        start_plan=None if config.plan is None else read_plan(config.plan),
        schedule=PlanSchedule()
        if config.plan_schedule is None
        else read_schedule(config.plan_schedule),
        injection=injection,
        pace=None if config.pace is None else read_pace(config.pace),
    )


def check_alike(inputs: Inputs, config: MalleusConfig, agreement: Agreement) -> None:
    """Refuse files that say something else on another node, by their content; a collective.

    Raises:
        MalleusError: on all ranks, naming the flag, the file and the ranks.
    """
    for flag, path, value in (
        ("--malleus-plan", config.plan, inputs.start_plan),
        ("--malleus-plan-schedule", config.plan_schedule, inputs.schedule),
        ("--malleus-inject", config.inject, inputs.injection),
        ("--malleus-pace", config.pace, inputs.pace),
    ):
        unlike = agreement.unlike_ranks(repr(value))
        error = None
        if agreement.rank in unlike:
            error = BadInputError(
                f"{flag} {path or 'is not given'}: not what rank 0 has, on rank "
                f"{gpu_ranges(unlike)}. Give the same file to all nodes."
            )
        agreement.raise_together(error)


def check_plans(
    inputs: Inputs, current: CurrentPlan, args: Any, memory: JobMemory | None = None
) -> None:
    """Refuse scripted plans that this job cannot run under.

    Raises:
        BadInputError: naming the plan's source and the numbers that do not fit.
    """
    sources = [("--malleus-plan", inputs.start_plan)] if inputs.start_plan else []
    sources += [
        (f"--malleus-plan-schedule, iteration {iteration}", plan)
        for iteration, plan in inputs.schedule.entries
    ]
    changes = bool(getattr(args, "step_batch_size_schedule", None))
    for source, plan in sources:
        try:
            current.check(plan)
            if inputs.pace is not None:
                inputs.pace.check(plan)
            if memory is not None:
                memory.check(plan)
        except BadInputError as error:
            raise BadInputError(f"{source}: {error}") from error
        total = current.nominal.num_microbatches
        if plan.num_microbatches != total and not changes:
            raise BadInputError(
                f"{source}: the plan has {plan.num_microbatches} micro-batches a step; the job has "
                f"{total} (global batch size {args.global_batch_size} / micro-batch size "
                f"{args.micro_batch_size})."
            )
