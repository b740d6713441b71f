"""Slow links apart from slow GPUs: what transfers take once both ends are there, link by link.

A transfer between stages is timed where its receiver waits for it: from the send's start to its
arrival. (A receiver that comes later finds what may have come long before.) Where a GPU sends and
receives at once it is told when both are done, so which way a link is slow is not said. A gradient
group is timed from the latest start among its members to each one's end. A link is compared with
those of its kind only: the same number of bytes, and inside a node or between nodes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low

from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.render import gpu_ranges
from malleus_megatron.whatif.joining import Joined, Recording
from malleus_megatron.whatif.operations import (
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD_RECV,
    FORWARD_SEND,
    GRADS,
)

SLOW = 2.0
"""A link is slow that takes more than this many times what links of its kind take,"""
MATTERS = 0.02
"""if what it takes longer, in all transfers of a step, is at least this part of the step,"""
LASTS = 3
"""in so many traced iterations one after the other; as many show that it is no longer."""

type Nodes = Mapping[int, int]
"""GPU -> node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between two stages' TP groups, both ways, or among GPUs that sum gradients."""

    gpus: tuple[int, ...]
    peers: tuple[int, ...] = ()
    """Of the next stage; none among GPUs that sum gradients."""

    def __str__(self) -> str:
        """As messages name it."""
        if not self.peers:
            return f"among GPUs {gpu_ranges(self.gpus)}, which sum gradients"
        return f"between GPU {gpu_ranges(self.gpus)} and GPU {gpu_ranges(self.peers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """What a link took in one iteration."""

    link: Link
    kind: tuple[object, ...]
    """Links of one kind carry as many bytes, over the same sort of wire."""
    seconds: float
    """Median of one transfer, of the slower way."""
    transfers: int
    """In the step, timed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkNews:
    """A link has become slow, or is no longer."""

    link: Link
    is_slow: bool
    seconds: float
    usual_s: float
    """On links of its kind."""


@dataclass(slots=True)
class LinkWatch:
    """Which links are slow, from one traced iteration to the next."""

    slow: set[Link] = field(default_factory=set)
    _streaks: dict[Link, int] = field(default_factory=dict)
    """Traced iterations in a row that speak against what is believed."""

    def look(
        self, times: Iterable[LinkTime], *, step_s: float, clock_error_s: float
    ) -> list[LinkNews]:
        """Take in an iteration.

        A kind with one link has nothing to compare it with; of two the faster is the usual one.

        Args:
            times: One for each link.
            step_s: What the iteration took.
            clock_error_s: Of the clocks by which it was timed; no smaller difference counts.
        """
        by_kind: dict[tuple[object, ...], list[LinkTime]] = defaultdict(list)
        for one in times:
            by_kind[one.kind].append(one)
        news = []
        for alike in by_kind.values():
            usual_s = median_low(one.seconds for one in alike)
            for one in alike:
                excess_s = one.seconds - usual_s
                looks_slow = (
                    one.seconds > SLOW * usual_s
                    and excess_s > clock_error_s
                    and excess_s * one.transfers >= MATTERS * step_s
                )
                if self._turns(one.link, looks_slow=looks_slow):
                    news.append(
                        LinkNews(
                            link=one.link,
                            is_slow=looks_slow,
                            seconds=one.seconds,
                            usual_s=usual_s,
                        )
                    )
        return news

    def _turns(self, link: Link, *, looks_slow: bool) -> bool:
        if looks_slow == (link in self.slow):
            self._streaks.pop(link, None)
            return False
        self._streaks[link] = self._streaks.get(link, 0) + 1
        if self._streaks[link] < LASTS:
            return False
        del self._streaks[link]
        self.slow ^= {link}
        return True


def link_times(
    plan: Plan, operations: Sequence[Joined], recordings: Sequence[Recording], nodes: Nodes
) -> list[LinkTime]:
    """What each link took that could be timed.

    Gradient groups are known where all pipelines have the same stages; other plans sum slices over
    many groups at once.

    Args:
        plan: In force.
        operations: Of its workers.
        recordings: By GPU, on one clock.
        nodes: Where each GPU is.
    """
    found = [*_between_stages(plan, operations, nodes)]
    shapes = {_shape(pipeline) for pipeline in plan.pipelines}
    if len(shapes) == 1 and len(plan.pipelines) > 1:
        found += _gradient_groups(plan, recordings, nodes)
    return found


def _between_stages(plan: Plan, operations: Sequence[Joined], nodes: Nodes) -> Iterator[LinkTime]:
    at = {row[:4]: row for row in operations}
    for dp_rank, pipeline in enumerate(plan.pipelines):
        for stage, (one, other) in enumerate(pairwise(pipeline.stages)):
            ways = [
                [
                    (at[sent], at[received])
                    for number in range(pipeline.num_microbatches)
                    if (sent := (dp_rank, stage + first, send, number)) in at
                    and (received := (dp_rank, stage + 1 - first, recv, number)) in at
                ]
                for first, send, recv in (
                    (0, FORWARD_SEND, FORWARD_RECV),
                    (1, BACKWARD_SEND, BACKWARD_RECV),
                )
            ]
            timed_s = [_awaited_s(pairs) for pairs in ways]
            if any(timed_s):
                yield LinkTime(
                    link=Link(gpus=one.gpus, peers=other.gpus),
                    kind=("stages", *_wire(one, other, nodes)),
                    seconds=max(median(seconds) for seconds in timed_s if seconds),
                    transfers=sum(map(len, ways)),
                )


def _awaited_s(pairs: Iterable[tuple[Joined, Joined]]) -> list[float]:
    """Of sends and receipts: what those took whose receiver was there first."""
    return [
        max(0.0, got.end_s - sent.start_s) for sent, got in pairs if got.start_s <= sent.start_s
    ]


def _wire(one: Stage, other: Stage, nodes: Nodes) -> tuple[object, ...]:
    """Two TP degrees, and whether the wire is inside a node."""
    inside = {nodes.get(gpu) for gpu in (*one.gpus, *other.gpus)}
    return len(one.gpus), len(other.gpus), len(inside) == 1


def _gradient_groups(
    plan: Plan, recordings: Sequence[Recording], nodes: Nodes
) -> Iterator[LinkTime]:
    """One for each stage and TP rank; ends have more to sum than what lies between them."""
    first = plan.pipelines[0]
    for number, stage in enumerate(first.stages):
        for tp_rank in range(len(stage.gpus)):
            members = tuple(sorted(p.stages[number].gpus[tp_rank] for p in plan.pipelines))
            spans = [_sums(recordings[gpu]) for gpu in members]
            if not all(spans) or len({len(own) for own in spans}) > 1:
                continue
            seconds = 0.0
            for together in zip(*spans, strict=True):
                begin_s = max(start_s for start_s, _ in together)
                seconds += max(0.0, median(end_s - begin_s for _, end_s in together))
            inside = len({nodes.get(gpu) for gpu in members}) == 1
            ends = number == 0, number == len(first.stages) - 1
            yield LinkTime(
                link=Link(gpus=members),
                kind=("gradients", *ends, stage.num_layers, len(stage.gpus), inside),
                seconds=seconds,
                transfers=1,
            )


def _sums(recording: Recording) -> list[tuple[float, float]]:
    return [(one.start_s, one.end_s) for one in recording.operations if one.kind == GRADS]


def _shape(pipeline: Pipeline) -> tuple[tuple[int, tuple[int, int]], ...]:
    return tuple((len(stage.gpus), stage.layers) for stage in pipeline.stages)
