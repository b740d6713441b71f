"""The memory model of a job: exact sizes of what it keeps, and the rest as measured.

What a stage keeps between steps follows from its parameters. Activations are measured as what one
micro-batch's forward pass leaves behind; what a step takes beyond both is laid to the ends of the
pipeline where only they show it, else to every stage. All of it is the largest that was seen.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from malleus_megatron.cost.memory import plan_memory_mib
from malleus_megatron.cost.stage import num_inflight
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.limits import LARGEST_MIB, check_within
from malleus_megatron.plan.plan import Plan, Stage
from malleus_megatron.plan.problem import ModelMemory

_REFERENCE_TP = 1
_ROUNDING_MIB = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Exact, over all GPUs of a TP group, in MiB."""

    layer_mib: float
    """Parameters and gradients of one layer."""
    embedding_mib: float
    head_mib: float
    layer_shared_mib: float
    """Optimizer state of one layer, of which each pipeline keeps a share."""
    layer_update_mib: float
    """Summed gradients of one layer, shared out likewise, for the optimizer's step under a plan."""
    embedding_shared_mib: float
    """State and summed gradients: there are hardly any activations beside them."""
    head_shared_mib: float
    replicated_mib: float
    """Activations of one layer and micro-batch that each GPU of a TP group has whole, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What one GPU used in a step, in MiB."""

    peak_mib: float
    """The most at any time, with all of the below."""
    outside_mib: float
    """Of the device, but not of the job's tensors: CUDA context, communicators, others."""
    held_mib: float
    """Parameters, gradients and optimizer state, which stay from step to step."""
    saved_mib: float
    """What the first micro-batch left behind for its backward pass, up to the last layer."""
    head_saved_mib: float
    """The same, from the last layer on."""

    def numbers(self) -> list[float]:
        """In the order of the fields, to be exchanged."""
        return [getattr(self, part.name) for part in fields(GpuMemory)]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "GpuMemory":
        """From `numbers`."""
        names = (part.name for part in fields(cls))
        return cls(**dict(zip(names, numbers, strict=True)))

    def fault(self) -> str | None:
        """What cannot be, with the numbers; None if nothing."""
        for part in fields(GpuMemory):
            value = getattr(self, part.name)
            if not (math.isfinite(value) and 0 <= value <= LARGEST_MIB):
                return f"{part.name} {value}; need 0 to {LARGEST_MIB:g}"
        least = self.outside_mib + self.held_mib
        if self.peak_mib < least - _ROUNDING_MIB:
            return f"a peak of {self.peak_mib:.1f} MiB, but {least:.1f} MiB are in use all the time"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A step's memory on every GPU under one plan."""

    plan: Plan
    gpus: tuple[GpuMemory, ...]
    """By GPU, standby GPUs too."""
    sharing: int
    """Pipelines that share optimizer state; 1: each keeps it all, as stock may."""
    update_mib: float = 0.0
    """Of one layer, over all pipelines: sums of gradients apart from the gradients' buffers."""

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured.

        Raises:
            BadInputError: with the GPU and the numbers.
        """
        if len(self.gpus) != len(list(self.plan.all_gpus())):
            raise BadInputError(
                f"Memory of {len(self.gpus)} GPUs; the plan has {len(list(self.plan.all_gpus()))}."
            )
        check_within("pipelines that share state", self.sharing, 1, len(self.plan.pipelines))
        for gpu, used in enumerate(self.gpus):
            fault = used.fault()
            if fault is not None:
                raise BadInputError(f"Memory of GPU {gpu}: {fault}.")

    def seats(self) -> Iterator["_Seat"]:
        """Of every GPU with a stage."""
        for pipeline in self.plan.pipelines:
            count = len(pipeline.stages)
            for index, stage in enumerate(pipeline.stages):
                inflight = num_inflight(
                    stage=index, num_stages=count, num_microbatches=pipeline.num_microbatches
                )
                for gpu in stage.gpus:
                    yield _Seat(
                        stage=stage,
                        used=self.gpus[gpu],
                        update_mib=self.update_mib / self.sharing,
                        inflight=inflight,
                        first=index == 0,
                        last=index == count - 1,
                    )

    def peaks_mib(self) -> tuple[tuple[float, ...], ...]:
        """The largest peak of each stage's GPUs, by pipeline and stage."""
        return tuple(
            tuple(max(self.gpus[gpu].peak_mib for gpu in stage.gpus) for stage in pipeline.stages)
            for pipeline in self.plan.pipelines
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """One GPU's place and what it used there."""

    stage: Stage
    used: GpuMemory
    update_mib: float
    """Of one layer, over the TP group."""
    inflight: int
    first: bool
    last: bool

    @property
    def tp_degree(self) -> int:
        return len(self.stage.gpus)

    @property
    def saved_mib(self) -> float:
        """Of one layer and micro-batch."""
        return self.used.saved_mib / max(1, self.stage.num_layers)

    def rest_mib(self) -> float:
        """What the step took beyond state and activations, over the TP group."""
        used = self.used
        passes = self.inflight * used.saved_mib + used.head_saved_mib * self.last
        update = self.stage.num_layers * self.update_mib / self.tp_degree
        known = used.outside_mib + used.held_mib + max(passes, update)
        return max(0.0, used.peak_mib - known) * self.tp_degree


def static_model(sizes: ModelSizes, *, reserve_mib: float = 0.0) -> ModelMemory:
    """What is known before the first step: no activations."""
    return ModelMemory(
        reference_tp=_REFERENCE_TP,
        layer_mib_by_inflight=(sizes.layer_mib,),
        embedding_mib=sizes.embedding_mib,
        head_mib=sizes.head_mib,
        reserve_mib=reserve_mib,
        layer_shared_mib=sizes.layer_shared_mib,
        layer_update_mib=sizes.layer_update_mib,
        embedding_shared_mib=sizes.embedding_shared_mib,
        head_shared_mib=sizes.head_shared_mib,
    )


def fitted_model(
    sizes: ModelSizes, measured: Sequence[MeasuredPlan], *, reserve_mib: float = 0.0
) -> ModelMemory:
    """The model that explains all measurements; it says less than none of them.

    Args:
        sizes: Exact.
        measured: Under any plans of the job; empty: nothing but the sizes is known.
        reserve_mib: To be kept free.
    """
    seats = [seat for one in measured for seat in one.seats()]
    if not seats:
        return static_model(sizes, reserve_mib=reserve_mib)
    whole = [min(sizes.replicated_mib, seat.saved_mib) for seat in seats]
    shared = max(
        (seat.saved_mib - part) * seat.tp_degree for seat, part in zip(seats, whole, strict=True)
    )
    heads = _largest(seat.used.head_saved_mib * seat.tp_degree for seat in seats if seat.last)
    working, embedding, head = _working_mib(seats)
    memory = replace(
        static_model(sizes, reserve_mib=reserve_mib),
        layer_mib_by_inflight=(sizes.layer_mib + shared, sizes.layer_mib + 2 * shared),
        replicated_mib=max(whole),
        embedding_mib=sizes.embedding_mib + embedding,
        head_mib=sizes.head_mib + head + heads,
        working_mib=working,
        fixed_mib=max(seat.used.outside_mib for seat in seats),
    )
    short = max(_shortfall_mib(memory, one) for one in measured)
    return replace(memory, fixed_mib=memory.fixed_mib + max(0.0, short))


def _working_mib(seats: Sequence[_Seat]) -> tuple[float, float, float]:
    """What every stage, a first one more, and a last one more computes with.

    Where no stage lies in the middle, what first and last ones both show is every stage's.
    """
    middle = [seat.rest_mib() for seat in seats if not seat.first and not seat.last]
    first = [seat.rest_mib() for seat in seats if seat.first and not seat.last]
    last = [seat.rest_mib() for seat in seats if seat.last and not seat.first]
    if middle:
        every = max(middle)
    elif first and last:
        every = min(max(first), max(last))
    else:
        every = max(seat.rest_mib() for seat in seats)
    return every, max(0.0, _largest(first) - every), max(0.0, _largest(last) - every)


def _shortfall_mib(memory: ModelMemory, one: MeasuredPlan) -> float:
    """By how much the model is below what was measured, at worst; below 0 if it never is."""
    said = plan_memory_mib(memory, one.plan, sharing=one.sharing)
    return max(
        peak - need
        for peaks, needs in zip(one.peaks_mib(), said, strict=True)
        for peak, need in zip(peaks, needs, strict=True)
    )


def _largest(values: Iterable[float]) -> float:
    return max(values, default=0.0)
