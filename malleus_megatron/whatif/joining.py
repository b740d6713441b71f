"""What the GPUs of a job recorded in one step, joined to operations of workers: TP groups."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import NamedTuple, Self

from malleus_megatron.plan.plan import Plan
from malleus_megatron.whatif.operations import (
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD_RECV,
    FORWARD_SEND,
    KINDS,
)

type Span = tuple[str, float, float]

_KINDS = sorted(KINDS)
_RECEIVED = {FORWARD_SEND: (FORWARD_RECV, 1), BACKWARD_SEND: (BACKWARD_RECV, -1)}
"""What a send arrives as, and how many stages further on."""


class Recorded(NamedTuple):
    """One operation of one GPU."""

    kind: str
    number: int
    """Among those of its kind that the GPU ran in the step, from 0."""
    start_s: float
    """On the GPU's own clock."""
    end_s: float


class Joined(NamedTuple):
    """One operation of one worker."""

    dp_rank: int
    stage: int
    kind: str
    number: int
    start_s: float
    """On one clock for all workers."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All that one GPU ran in one step."""

    operations: tuple[Recorded, ...]

    @classmethod
    def of_spans(cls, spans: Iterable[Span], kinds_of: Mapping[str, Sequence[str]]) -> Self:
        """Number the operations of each kind.

        Args:
            spans: Name, start and end, in order of time.
            kinds_of: What a span of a name is; two kinds where two things happen at once.
        """
        counts: Counter[str] = Counter()
        operations = []
        for name, start_s, end_s in spans:
            for kind in kinds_of[name]:
                operations.append(Recorded(kind, counts[kind], start_s, end_s))
                counts[kind] += 1
        return cls(operations=tuple(operations))

    def pack(self) -> bytes:
        """As bytes of one length for each operation; times keep all their bits."""
        return array(
            "d",
            [
                value
                for kind, number, start_s, end_s in self.operations
                for value in (_KINDS.index(kind), number, start_s, end_s)
            ],
        ).tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """From `pack`."""
        numbers = array("d", packed)
        return cls(
            operations=tuple(
                Recorded(_KINDS[int(kind)], int(number), start_s, end_s)
                for kind, number, start_s, end_s in batched(numbers, 4)
            )
        )

    def later_by(self, seconds: float) -> Self:
        """The same on another clock."""
        return type(self)(
            operations=tuple(
                one._replace(start_s=one.start_s + seconds, end_s=one.end_s + seconds)
                for one in self.operations
            )
        )


def joined(plan: Plan, recordings: Sequence[Recording]) -> list[Joined]:
    """The operations of a plan's workers.

    A TP group's operation lasts from when its last member has begun it until its last member has
    ended it: then no two of a worker overlap, since no member's do, and a transfer or collective
    cannot begin before. A send ends, at the latest, when what it sent has been received: where a
    GPU sends and receives at once, it is told only when both are done.

    Args:
        plan: In force in the step.
        recordings: By GPU, on one clock.
    """
    rows = [
        one
        for dp_rank, pipeline in enumerate(plan.pipelines)
        for stage, group in enumerate(pipeline.stages)
        for one in _of_worker(dp_rank, stage, [recordings[gpu] for gpu in group.gpus])
    ]
    return sorted(_with_ends(rows), key=lambda row: (row.dp_rank, row.stage, row.start_s))


def _of_worker(dp_rank: int, stage: int, members: Iterable[Recording]) -> Iterator[Joined]:
    found: dict[tuple[str, int], list[Recorded]] = defaultdict(list)
    for recording in members:
        for one in recording.operations:
            found[one.kind, one.number].append(one)
    for (kind, number), ones in found.items():
        start_s = max(one.start_s for one in ones)
        end_s = max(one.end_s for one in ones)
        yield Joined(dp_rank, stage, kind, number, start_s, end_s)


def _with_ends(rows: Sequence[Joined]) -> Iterator[Joined]:
    end_of = {row[:4]: row.end_s for row in rows}
    for row in rows:
        kind, further = _RECEIVED.get(row.kind, (None, 0))
        arrived_s = end_of.get((row.dp_rank, row.stage + further, kind or "", row.number))
        if kind is None or arrived_s is None:
            yield row
        else:
            yield row._replace(end_s=max(row.start_s, min(row.end_s, arrived_s)))
