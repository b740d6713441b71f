"""The schedule that a trace shows: the order of compute on each stage, checked in every step."""

from dataclasses import replace

import numpy as np

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.operations import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    COMPUTE,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
)
from malleus_megatron.whatif.trace import SkippedStep, Trace

MOST_OVERLAP = 0.1
"""Share of a compute operation that the next one may overlap: clocks are read with an error."""
LONGEST_STEP = 10.0
"""Times the median step."""

Order = tuple[tuple[int, ...], ...]
"""Positions of the compute operations of each stage, as they follow each other."""


def in_one_order(trace: Trace) -> tuple[Trace, Order]:
    """The trace without steps that stand for none, and the order of compute.

    Left out are steps whose compute overlaps or runs in an unusual order, and steps so long that
    one would outweigh all others.

    Raises:
        BadInputError: the operations of a stage do not fit a pipeline, or no step is left.
    """
    check_stages(trace)
    order = tuple(_usual_order(trace, stage) for stage in range(trace.num_stages))
    reasons = _outlasting(trace)
    for stage, positions in enumerate(order):
        start_s, duration_s = trace.start_s[list(positions)], trace.duration_s[list(positions)]
        late_s = start_s[:-1] + duration_s[:-1] - start_s[1:]
        wrong = (start_s[1:] < start_s[:-1]) | (late_s > MOST_OVERLAP * duration_s[:-1])
        for place, step, dp_rank in np.argwhere(wrong):
            first, second = (trace.operations[positions[place + n]] for n in (0, 1))
            reasons.setdefault(
                int(step),
                f"{second.kind} {second.number} of stage {stage}, dp rank {dp_rank}: starts before "
                f"{first.kind} {first.number} ends",
            )
    return _without(trace, reasons), order


def check_stages(trace: Trace) -> None:
    """Every stage computes the same micro-batches and talks to its neighbours about each.

    Raises:
        BadInputError: names the stage and the operations that are missing or too many.
    """
    last = trace.num_stages - 1
    count = len(trace.of(0, FORWARD))
    for stage in range(trace.num_stages):
        expected = {
            FORWARD: count,
            BACKWARD: count,
            FORWARD_RECV: count if stage > 0 else 0,
            BACKWARD_SEND: count if stage > 0 else 0,
            FORWARD_SEND: count if stage < last else 0,
            BACKWARD_RECV: count if stage < last else 0,
        }
        for kind, number in expected.items():
            found = [trace.operations[index].number for index in trace.of(stage, kind)]
            if not count or len(found) != number:
                raise BadInputError(
                    f"stage {stage} of {trace.num_stages} has {len(found)} {kind} a step; a "
                    f"pipeline of {count} micro-batches has {number} there."
                )
            if found != list(range(number)):
                raise BadInputError(
                    f"the {kind} of stage {stage} are numbered {found[0]} to {found[-1]}; seq_id "
                    f"must count all {number} from 0."
                )


def _outlasting(trace: Trace) -> dict[int, str]:
    step_s = trace.measured_step_s()
    middle_s = float(np.median(step_s))
    return {
        int(index): f"takes {step_s[index]:.3g} s, the median step {middle_s:.3g} s"
        for index in np.flatnonzero(step_s > LONGEST_STEP * middle_s)
    }


def _usual_order(trace: Trace, stage: int) -> tuple[int, ...]:
    """By middle start time: in steps of the same order that is the order."""
    positions = trace.of(stage, *COMPUTE)
    middle_s = np.median(trace.start_s[positions], axis=(1, 2))
    return tuple(positions[place] for place in np.argsort(middle_s, kind="stable"))


def _without(trace: Trace, reasons: dict[int, str]) -> Trace:
    if not reasons:
        return trace
    skipped = [
        SkippedStep(step=trace.steps[index], reason=reasons[index]) for index in sorted(reasons)
    ]
    keep = [index for index in range(len(trace.steps)) if index not in reasons]
    if not keep:
        raise BadInputError(
            f"none of its {len(trace.steps)} steps has a time line that can be; step "
            f"{skipped[0].step}: {skipped[0].reason}."
        )
    return replace(
        trace,
        steps=tuple(trace.steps[index] for index in keep),
        start_s=trace.start_s[:, keep],
        duration_s=trace.duration_s[:, keep],
        skipped=tuple(sorted((*trace.skipped, *skipped), key=lambda skip: skip.step)),
    )
