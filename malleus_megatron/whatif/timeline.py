"""The measured and the ideal time line as Chrome trace events, which ui.perfetto.dev opens."""

import json
from collections.abc import Iterator

import numpy as np

from malleus_megatron.whatif.operations import (
    BACKWARD_RECV,
    BACKWARD_SEND,
    COMMUNICATION,
    FORWARD_RECV,
    FORWARD_SEND,
)
from malleus_megatron.whatif.replay import replay
from malleus_megatron.whatif.trace import Trace
from malleus_megatron.whatif.what_if import WhatIf

STREAMS = {FORWARD_SEND: 2, FORWARD_RECV: 3, BACKWARD_SEND: 4, BACKWARD_RECV: 5}
"""One thread each; compute is thread 0, other collectives are thread 1."""
MOST_EVENTS = 300_000
"""More make a page slow. Whole steps are written, at least one."""


def steps_shown(what_if: WhatIf) -> int:
    """How many steps, from the first on, fit into a time line."""
    per_step = 2 * len(what_if.trace.operations) * what_if.trace.num_pipelines
    return min(len(what_if.trace.steps), max(1, MOST_EVENTS // per_step))


def to_perfetto(what_if: WhatIf) -> Iterator[str]:
    """The JSON text in pieces: each worker is two processes, as it was and as it could be."""
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    ideal = replay(what_if.events, what_if.typical_s)
    trace = what_if.trace
    yield ",\n".join([*_processes(trace, 0, "measured"), *_processes(trace, 1, "ideal")])
    lines = (trace.start_s, trace.end_s), (ideal.start_s, ideal.end_s)
    lengths_s = np.maximum(trace.measured_step_s(), ideal.step_s)
    begins_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    for step in range(steps_shown(what_if)):
        for what, (start_s, end_s) in enumerate(lines):
            begin_us = 1e6 * (begins_s[step] + start_s[:, step])
            length_us = 1e6 * (end_s[:, step] - start_s[:, step])
            yield from _step(trace, step, what, (begin_us.tolist(), length_us.tolist()))
    yield "\n]}\n"


def _processes(trace: Trace, what: int, name: str) -> Iterator[str]:
    first = what * trace.num_stages * trace.num_pipelines
    for worker in range(trace.num_stages * trace.num_pipelines):
        dp_rank, stage = divmod(worker, trace.num_stages)
        names = {"name": f"{name}: dp {dp_rank}, stage {stage}"}
        yield json.dumps({"ph": "M", "name": "process_name", "pid": first + worker, "args": names})


def _step(
    trace: Trace, step: int, what: int, times_us: tuple[list[list[float]], list[list[float]]]
) -> Iterator[str]:
    """Events of one step, each after a comma.

    Args:
        trace: Names the operations.
        step: Index.
        what: 0 measured, 1 ideal.
        times_us: Begins and lengths, [operation, dp].
    """
    first = what * trace.num_stages * trace.num_pipelines
    for operation, begins_us, lengths_us in zip(trace.operations, *times_us, strict=True):
        thread = STREAMS.get(operation.kind, 1 if operation.kind in COMMUNICATION else 0)
        for dp_rank, (begin_us, length_us) in enumerate(zip(begins_us, lengths_us, strict=True)):
            process = first + dp_rank * trace.num_stages + operation.stage
            yield (
                f',\n{{"ph": "X", "name": "{operation.kind} {operation.number}", '
                f'"pid": {process}, "tid": {thread}, "ts": {begin_us:.3f}, '
                f'"dur": {length_us:.3f}, "args": {{"step": {trace.steps[step]}}}}}'
            )
