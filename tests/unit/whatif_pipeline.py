"""Traces of pipelines whose every time is known: 1F1B played operation by operation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from malleus_megatron.whatif.rows import Rows

TimeOf = Callable[[str, int, int, int, int], float]
"""(forward or backward, step, dp rank, stage, micro-batch) -> seconds."""

Row = tuple[int, int, int, str, int, float, float]
"""dp_rank, stage, step, optype, number, start, duration."""


def steady(_kind: str, _step: int, _dp_rank: int, _stage: int, _microbatch: int) -> float:
    """A forward takes 1 s, a backward 2 s."""
    return 1.0 if _kind == "forward" else 2.0


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """A job of non-interleaved 1F1B pipelines."""

    num_pipelines: int = 2
    num_stages: int = 2
    num_microbatches: int = 4
    steps: Sequence[int] = (10, 20, 30)
    time_of: TimeOf = steady
    transfer_s: float = 0.0
    grads_s: float | None = None
    """With a value the step ends with the gradients' collective over all pipelines."""
    late_s: Callable[[int], float] = field(default=lambda _step: 0.0)
    """Of each step: idle time before its collective."""

    def rows(self) -> list[Row]:
        """Every operation of every step."""
        return [row for step in self.steps for row in self._step(step)]

    def _step(self, step: int) -> list[Row]:
        rows: list[Row] = []
        ends: dict[tuple[int, int], float] = {}
        for dp_rank in range(self.num_pipelines):
            pipeline = _Pipeline(self, step, dp_rank)
            rows += pipeline.rows()
            ends |= {(dp_rank, stage): pipeline.ends(stage) for stage in range(self.num_stages)}
        if self.grads_s is not None:
            for (dp_rank, stage), own in ends.items():
                last = max(ends[other, stage] for other in range(self.num_pipelines))
                start, duration = own + self.late_s(step), last + self.grads_s - own
                rows.append((dp_rank, stage, step, "grads-reduce-scatter", 0, start, duration))
        return rows


class _Pipeline:
    """One step of one pipeline: an operation ends when its own and its neighbours' have."""

    def __init__(self, job: Pipelines, step: int, dp_rank: int) -> None:
        self.job, self.step, self.dp_rank = job, step, dp_rank
        self.end = cache(self._end)

    def order(self, stage: int) -> list[tuple[str, int]]:
        count = self.job.num_microbatches
        warm = min(self.job.num_stages - stage - 1, count)
        forward = [("forward", number) for number in range(count)]
        backward = [("backward", number) for number in range(count)]
        middle = [pair for both in zip(forward[warm:], backward, strict=False) for pair in both]
        return [*forward[:warm], *middle, *backward[count - warm :]]

    def start(self, kind: str, stage: int, number: int) -> float:
        order = self.order(stage)
        place = order.index((kind, number))
        before = self.end(*order[place - 1][:1], stage, order[place - 1][1]) if place else 0.0
        peer = stage - 1 if kind == "forward" else stage + 1
        if 0 <= peer < self.job.num_stages:
            return max(before, self.message_end(kind, peer, number))
        return before

    def _end(self, kind: str, stage: int, number: int) -> float:
        time_s = self.job.time_of(kind, self.step, self.dp_rank, stage, number)
        return self.start(kind, stage, number) + time_s

    def message_end(self, kind: str, sender: int, number: int) -> float:
        """When what the sender computed is with its neighbour."""
        begin = max(self.send_start(kind, sender, number), self.recv_start(kind, sender, number))
        return begin + self.job.transfer_s

    def send_start(self, kind: str, sender: int, number: int) -> float:
        before = self.message_end(kind, sender, number - 1) if number else 0.0
        return max(before, self.end(kind, sender, number))

    def recv_start(self, kind: str, sender: int, number: int) -> float:
        receiver = sender + 1 if kind == "forward" else sender - 1
        if number:
            before = self.message_end(kind, sender, number - 1)
            return max(before, self.end(kind, receiver, number - 1))
        order = self.order(receiver)
        first = order.index(("backward", 0))
        if kind == "backward" and first >= 2:
            return self.end(order[first - 2][0], receiver, order[first - 2][1])
        return 0.0

    def ends(self, stage: int) -> float:
        return self.end("backward", stage, self.job.num_microbatches - 1)

    def rows(self) -> list[Row]:
        rows = []
        for stage in range(self.job.num_stages):
            for kind, number in self.order(stage):
                begin, end = self.start(kind, stage, number), self.end(kind, stage, number)
                rows.append(self._row(stage, f"{kind}-compute", number, begin, end))
                receiver = stage + 1 if kind == "forward" else stage - 1
                if 0 <= receiver < self.job.num_stages:
                    over = self.message_end(kind, stage, number)
                    sent = self.send_start(kind, stage, number)
                    received = self.recv_start(kind, stage, number)
                    rows.append(self._row(stage, f"{kind}-send", number, sent, over))
                    rows.append(self._row(receiver, f"{kind}-recv", number, received, over))
        return rows

    def _row(self, stage: int, kind: str, number: int, begin: float, end: float) -> Row:
        return (self.dp_rank, stage, self.step, kind, number, begin, end - begin)


def to_rows(listed: Sequence[Row]) -> Rows:
    """As the reader gives them."""
    dp_rank, stage, step, kind, number, start_s, duration_s = zip(*listed, strict=True)
    kinds, index = np.unique(np.array(kind), return_inverse=True)
    return Rows(
        dp_rank=np.array(dp_rank),
        stage=np.array(stage),
        step=np.array(step),
        kind=index,
        kinds=tuple(str(name) for name in kinds),
        number=np.array(number),
        chunk=np.full(len(listed), -1),
        start_s=np.array(start_s, dtype=np.float64),
        duration_s=np.array(duration_s, dtype=np.float64),
    )


def table(listed: Sequence[Row]) -> pyarrow.Table:
    """The columns of a trace file."""
    names = ("dp_rank", "stage", "step", "optype", "seq_id", "start_ts", "duration")
    columns = zip(*listed, strict=True)
    return pyarrow.table({name: list(column) for name, column in zip(names, columns, strict=True)})


def write(listed: Sequence[Row], path: Path) -> Path:
    """A trace file."""
    parquet.write_table(table(listed), path)
    return path


def slower(job: Pipelines, dp_rank: int, stage: int, rate: float) -> Pipelines:
    """The job with one worker that takes `rate` times as long."""

    def time_of(kind: str, step: int, own_dp: int, own_stage: int, microbatch: int) -> float:
        time_s = job.time_of(kind, step, own_dp, own_stage, microbatch)
        return time_s * (rate if (own_dp, own_stage) == (dp_rank, stage) else 1.0)

    return replace(job, time_of=time_of)
