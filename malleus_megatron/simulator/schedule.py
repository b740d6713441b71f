"""One pipeline under Megatron's non-interleaved 1F1B schedule, operation by operation.

Between two operations a stage talks to its neighbours as Megatron does, and waits until that is
done. Where a forward and a backward follow each other, sending and receiving are one call; where
two of a kind do, it sends first. A message passes when both ends are there: a sender whose
neighbour is busy waits for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_OVER = object()


class Operation(NamedTuple):
    """A forward or a backward of one micro-batch in one stage."""

    is_forward: bool
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When everything starts in a pipeline, in seconds from the start of the step."""

    starts_s: tuple[tuple[float, ...], ...]
    """By stage, in the order of `stage_operations`."""
    end_s: float
    """All stages are done and their last messages have passed."""


def num_warmup(stage: int, num_stages: int, num_microbatches: int) -> int:
    """Forwards of a stage before its first 1F1B pair: min(p - j - 1, m), j from 0."""
    return min(num_stages - stage - 1, num_microbatches)


def stage_operations(stage: int, num_stages: int, num_microbatches: int) -> list[Operation]:
    """What a stage computes, in order: warm-up, pairs of a forward and a backward, cool-down."""
    warmup = num_warmup(stage, num_stages, num_microbatches)
    forwards = [Operation(True, number) for number in range(num_microbatches)]  # noqa: FBT003
    backwards = [Operation(False, number) for number in range(num_microbatches)]  # noqa: FBT003
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [operation for pair in pairs for operation in pair]
    return [*forwards[:warmup], *steady, *backwards[num_microbatches - warmup :]]


def play(
    stage_times_s: Sequence[float],
    num_microbatches: int,
    *,
    forward_share: float,
    transfer_s: float = 0.0,
) -> Timeline:
    """Play a pipeline's part of a step.

    Args:
        stage_times_s: Forward plus backward of one micro-batch, per stage.
        num_microbatches: Of this pipeline, at least 1.
        forward_share: The forward's part of these times, 0 to 1; the same in all stages.
        transfer_s: One message between two stages, once both are there.
    """
    wires = _Wires(transfer_s)
    stages = [
        _Stage(
            operations=stage_operations(stage, len(stage_times_s), num_microbatches),
            wires=wires,
            place=stage,
            is_last=stage == len(stage_times_s) - 1,
            forward_s=time_s * forward_share,
            backward_s=time_s * (1 - forward_share),
        )
        for stage, time_s in enumerate(stage_times_s)
    ]
    running = [stage.run() for stage in stages]
    while running:
        running = [stage for stage in running if next(stage, _OVER) is not _OVER]
    return Timeline(
        starts_s=tuple(tuple(stage.starts_s) for stage in stages),
        end_s=max(stage.now_s for stage in stages),
    )


class _Message(NamedTuple):
    """An activation, or a gradient, between stage `boundary` and the next."""

    boundary: int
    operation: Operation


class _Wires:
    """Messages for which one end is there or both are."""

    def __init__(self, transfer_s: float) -> None:
        self._transfer_s = transfer_s
        self._waiting_s: dict[_Message, float] = {}
        self._passed_s: dict[_Message, float] = {}

    def come(self, message: _Message, now_s: float) -> None:
        """One end is there; with the second one the message passes."""
        first_s = self._waiting_s.pop(message, None)
        if first_s is None:
            self._waiting_s[message] = now_s
        else:
            self._passed_s[message] = max(first_s, now_s) + self._transfer_s

    def passed_s(self, message: _Message) -> float | None:
        """When it has passed; None while an end is missing."""
        return self._passed_s.get(message)


@dataclass(slots=True, kw_only=True)
class _Stage:
    operations: list[Operation]
    wires: _Wires
    place: int
    is_last: bool
    forward_s: float
    backward_s: float
    starts_s: list[float] = field(default_factory=list)
    now_s: float = 0.0

    def run(self) -> Iterator[None]:
        """Go through the operations; hands over whenever a neighbour is missing."""
        before: list[_Message] = []
        last: Operation | None = None
        for operation in self.operations:
            needed = self._input(operation)
            if last is not None and last.is_forward == operation.is_forward:
                yield from self._meet(before)
                yield from self._meet(needed)
            else:
                yield from self._meet(before + needed)
            self.starts_s.append(self.now_s)
            self.now_s += self.forward_s if operation.is_forward else self.backward_s
            before, last = self._output(operation), operation
        yield from self._meet(before)

    def _meet(self, messages: list[_Message]) -> Iterator[None]:
        for message in messages:
            self.wires.come(message, self.now_s)
        for message in messages:
            while (passed_s := self.wires.passed_s(message)) is None:
                yield
            self.now_s = max(self.now_s, passed_s)

    def _input(self, operation: Operation) -> list[_Message]:
        if operation.is_forward:
            return [_Message(self.place - 1, operation)] if self.place else []
        return [] if self.is_last else [_Message(self.place, operation)]

    def _output(self, operation: Operation) -> list[_Message]:
        if operation.is_forward:
            return [] if self.is_last else [_Message(self.place, operation)]
        return [_Message(self.place - 1, operation)] if self.place else []
