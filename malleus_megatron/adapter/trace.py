"""`--malleus-trace`: in every N-th iteration what each GPU did and when, as `malleus whatif` reads.

Megatron starts and stops a timer of its own around each operation. In a traced iteration its timers
leave a mark, too; nothing else of a step changes. Without the flag nothing here is in place.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import mpu
from megatron.training import get_args

from malleus_megatron.control.current import CurrentPlan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.runtime.agreement import Agreement
from malleus_megatron.runtime.operation_trace import OperationTrace
from malleus_megatron.runtime.patching import Replacement
from malleus_megatron.whatif.clocks import clock_offsets
from malleus_megatron.whatif.joining import Recording
from malleus_megatron.whatif.operations import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    CLIP,
    COLLECTION,
    EMBEDDING,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    GRADS,
    LAYERNORM,
    OPTIMIZER,
    PARAMS,
)

_CLOCK_ROUNDS = 4
"""Collectives that compare the clocks: the quickest of them counts."""
_ALWAYS = {
    "forward-compute": (FORWARD,),
    "backward-compute": (BACKWARD,),
    "forward-recv": (FORWARD_RECV,),
    "forward-send": (FORWARD_SEND,),
    "backward-recv": (BACKWARD_RECV,),
    "backward-send": (BACKWARD_SEND,),
    "forward-send-backward-recv": (FORWARD_SEND, BACKWARD_RECV),
    "backward-send-forward-recv": (BACKWARD_SEND, FORWARD_RECV),
    "all-grads-sync": (GRADS,),
    "optimizer-clip-main-grad": (CLIP,),
    "optimizer-inner-step": (OPTIMIZER,),
    "params-all-gather": (PARAMS,),
    COLLECTION: (COLLECTION,),
}
"""Megatron's timers, and the operations that they are around."""
_LAYERNORM = {"non-tensor-parallel-grads-all-reduce": (LAYERNORM,)}
_EMBEDDING = {"embedding-grads-all-reduce": (EMBEDDING,)}


def no_trace_of(args: Any) -> str | None:
    """Why a recipe cannot be traced, or None."""
    if getattr(args, "virtual_pipeline_model_parallel_size", None) is not None:
        return "its schedule is interleaved, and the analysis reads one model chunk a stage"
    if getattr(args, "cuda_graph_impl", "none") != "none":
        return "events that are recorded into a CUDA graph cannot be read"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """An iteration that is being traced."""

    iteration: int
    generation: int
    plan: Plan
    stamps: list[float]
    kinds_of: dict[str, tuple[str, ...]]


class Writer(Protocol):
    """Rank 0's."""

    def write(self, step: TracedStep, recordings: list[Recording], clock_error_s: float) -> None:
        """Keep what was traced; nothing here can end a job."""


class JobTrace:
    """Traces one rank. All ranks call the same methods in the same order."""

    def __init__(
        self,
        every: int,
        *,
        agreement: Agreement,
        device: torch.device,
        writer: Writer | None,
    ) -> None:
        """Trace nothing yet.

        Args:
            every: Iterations whose number this divides are traced.
            agreement: The ranks' control channel.
            device: Where the rank trains.
            writer: On rank 0.
        """
        self.operations = OperationTrace(device)
        self._every = every
        self._agreement = agreement
        self._writer = writer
        self._traced: TracedStep | None = None

    def begin(self, iteration: int, current: CurrentPlan, *, is_reshaped: bool) -> None:
        """Before an iteration's step, behind all else of its boundary; a collective."""
        if iteration % self._every:
            return
        stamps = [time.perf_counter()]
        for _ in range(_CLOCK_ROUNDS):
            self._agreement.exchange([0.0])
            stamps.append(time.perf_counter())
        self._traced = TracedStep(
            iteration=iteration,
            generation=current.generation,
            plan=current.plan,
            stamps=stamps,
            kinds_of=_kinds_of(is_reshaped=is_reshaped),
        )
        self.operations.begin()

    def end(self) -> None:
        """After the step."""
        self.operations.end()

    def share(self) -> None:
        """At the next boundary: give rank 0 what was traced; a collective if anything was."""
        traced, self._traced = self._traced, None
        if traced is None:
            return
        spans = self.operations.read(COLLECTION)
        kinds_of = traced.kinds_of
        mine = Recording.of_spans((span for span in spans if span[0] in kinds_of), kinds_of)
        stamps = self._agreement.exchange(traced.stamps)
        packed = self._agreement.gather(mine.pack())
        if self._writer is None:
            return
        offsets = clock_offsets([[*itertools.pairwise(own)] for own in stamps])
        recordings = [
            Recording.unpack(bytes_).later_by(-offset.seconds)
            for bytes_, offset in zip(packed, offsets, strict=True)
        ]
        self._writer.write(
            traced,
            recordings,
            clock_error_s=max(offset.error_s for offset in offsets),
        )


def trace_row(of_job: Callable[[], JobTrace | None]) -> Replacement:
    """The one attribute that a trace replaces.

    Args:
        of_job: The trace of the present job, if there is one.
    """
    return Replacement(
        target="megatron.core.timers.Timers.__call__",
        signature="(self, name, log_level=)",
        make=functools.partial(_marking, of_job),
        reason="--malleus-trace: in a traced iteration Megatron's timers leave marks.",
    )


def _marking(
    of_job: Callable[[], JobTrace | None], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def timer_of(self: Any, name: str, log_level: int | None = None) -> Any:
        timer = original(self, name, log_level)
        trace = of_job()
        if trace is None or not trace.operations.is_on:
            return timer
        return _MarkingTimer(timer, name, trace.operations)

    return timer_of


class _MarkingTimer:
    """One of Megatron's timers, for one call."""

    def __init__(self, timer: Any, name: str, operations: OperationTrace) -> None:
        self._timer = timer
        self._name = name
        self._operations = operations

    def start(self, barrier: bool = False) -> None:
        self._timer.start(barrier=barrier)
        self._operations.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._operations.stop(self._name)
        self._timer.stop(barrier=barrier)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._timer, attribute)


def _kinds_of(*, is_reshaped: bool) -> dict[str, tuple[str, ...]]:
    """Timers that are around something on this rank: Megatron calls some that are around nothing.

    Stages of ours sum a tied embedding with all other gradients.
    """
    args = get_args()
    kinds_of = dict(_ALWAYS)
    if getattr(args, "sequence_parallel", False):
        kinds_of |= _LAYERNORM
    tied = not args.untie_embeddings_and_output_weights
    shared = tied and mpu.get_pipeline_model_parallel_world_size() > 1
    if shared and not is_reshaped and mpu.is_rank_in_embedding_group():
        kinds_of |= _EMBEDDING
    return kinds_of
