"""Which operation waits for which: the same in every step and pipeline."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.operations import (
    ACROSS_PIPELINES,
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    BETWEEN_STAGES,
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
    SEPARATE_GRADS,
)
from malleus_megatron.whatif.schedule import Order
from malleus_megatron.whatif.trace import Trace

Needs = dict[int, set[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Operations that begin their work together; a compute operation is alone."""

    operations: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    """Of each operation: those that end before it starts. None: it starts with the step."""
    together: bool
    """A transfer or collective: work begins when the last of its operations has started."""
    across_pipelines: bool
    """And so in all pipelines."""


def dependencies(trace: Trace, order: Order) -> tuple[Event, ...]:
    """All operations as events, each after those that it needs.

    Operations follow each other in the streams that Megatron runs them in: compute, the
    data-parallel collectives, and one for each direction of transfers. Between streams a
    micro-batch is received, computed and sent.

    Raises:
        BadInputError: the operations wait for each other in a circle.
    """
    needs: Needs = {index: set() for index in range(len(trace.operations))}
    for stage, compute in enumerate(order):
        _chain(needs, compute)
        for kind in BETWEEN_STAGES:
            _chain(needs, trace.of(stage, kind))
        _around_compute(needs, trace, stage)
        _first_backward(needs, trace, stage, compute)
        _after_compute(needs, trace, stage, compute)
    return _sorted(trace, needs)


def _chain(needs: Needs, operations: Sequence[int]) -> None:
    for before, after in pairwise(operations):
        needs[after].add(before)


def _around_compute(needs: Needs, trace: Trace, stage: int) -> None:
    """Received before it is computed, sent after; the next is received when one is computed."""
    for kind, recv, send in (
        (FORWARD, FORWARD_RECV, FORWARD_SEND),
        (BACKWARD, BACKWARD_RECV, BACKWARD_SEND),
    ):
        computed = trace.of(stage, kind)
        received = trace.of(stage, recv)
        for compute, message in zip(computed, received, strict=False):
            needs[compute].add(message)
        for before, message in zip(computed, received[1:], strict=False):
            needs[message].add(before)
        for compute, message in zip(computed, trace.of(stage, send), strict=False):
            needs[message].add(compute)


def _first_backward(needs: Needs, trace: Trace, stage: int, compute: Sequence[int]) -> None:
    """The first gradient is awaited from when the last forward before it but one has ended."""
    kinds = [trace.operations[index].kind for index in compute]
    before = kinds.index(BACKWARD) - 2
    if before >= 0:
        for message in trace.of(stage, BACKWARD_RECV)[:1]:
            needs[message].add(compute[before])


def _after_compute(needs: Needs, trace: Trace, stage: int, compute: Sequence[int]) -> None:
    """Parameters are gathered before the first micro-batch; gradients are summed after the last.

    With a collective for separate gradients, those of the others overlap with compute.
    """
    params, grads = trace.of(stage, PARAMS), trace.of(stage, GRADS)
    separate = trace.of(stage, SEPARATE_GRADS)
    needs[compute[0]].update(params[-1:])
    _chain(needs, [*params, *grads])
    if separate:
        for first in grads[:1]:
            needs[first].add(compute[-1])
    tail = [
        *trace.of(stage, LAYERNORM),
        *trace.of(stage, EMBEDDING),
        *(separate or grads),
        *trace.of(stage, CLIP),
        *trace.of(stage, OPTIMIZER),
    ]
    _chain(needs, [compute[-1], *trace.of(stage, COLLECTION), *tail])
    if separate and tail:
        needs[tail[0]].update(grads[-1:])


def _groups(trace: Trace) -> Iterable[tuple[list[int], bool, bool]]:
    """(operations, whether they work together, and across pipelines), each operation once."""
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index, operation in enumerate(trace.operations):
        stage, kind, number = operation
        if kind in {FORWARD_SEND, BACKWARD_RECV}:
            key = (kind, number, stage)
        elif kind in {FORWARD_RECV, BACKWARD_SEND}:
            partner = FORWARD_SEND if kind == FORWARD_RECV else BACKWARD_RECV
            key = (partner, number, stage - 1)
        else:
            key = (kind, number, -1 if kind in {EMBEDDING, CLIP} else stage)
        groups[key].append(index)
    for (kind, _, _), members in groups.items():
        together = kind in {FORWARD_SEND, BACKWARD_RECV, EMBEDDING, *ACROSS_PIPELINES}
        yield members, together, kind in ACROSS_PIPELINES


def _sorted(trace: Trace, needs: Needs) -> tuple[Event, ...]:
    """Events in an order in which every operation comes after those that it needs."""
    groups = list(_groups(trace))
    event_of = {index: event for event, (members, _, _) in enumerate(groups) for index in members}
    waits_for = [
        {event_of[need] for index in members for need in needs[index]} for members, _, _ in groups
    ]
    followers: dict[int, list[int]] = defaultdict(list)
    for event, others in enumerate(waits_for):
        for other in others:
            followers[other].append(event)
    open_needs = [len(others) for others in waits_for]
    ready = [event for event, count in enumerate(open_needs) if count == 0]
    for event in ready:  # grows while it is walked
        for follower in followers[event]:
            open_needs[follower] -= 1
            if open_needs[follower] == 0:
                ready.append(follower)
    if len(ready) < len(groups):
        stuck = next(event for event, count in enumerate(open_needs) if count)
        raise BadInputError(
            "its operations wait for each other in a circle, so this is no pipeline schedule: "
            f"{trace.operations[groups[stuck][0][0]]} can never start."
        )
    return tuple(
        Event(
            operations=tuple(groups[event][0]),
            needs=tuple(tuple(sorted(needs[index])) for index in groups[event][0]),
            together=groups[event][1],
            across_pipelines=groups[event][2],
        )
        for event in ready
    )
