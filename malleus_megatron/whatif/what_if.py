"""Questions to a trace: the mean step time, had some operations taken their typical time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.dependencies import Event, dependencies
from malleus_megatron.whatif.operations import COMMUNICATION
from malleus_megatron.whatif.replay import replay, work_of
from malleus_megatron.whatif.rows import Floats
from malleus_megatron.whatif.schedule import in_one_order
from malleus_megatron.whatif.trace import Trace

Where = Any
"""Index into [operation, step, dp], as `numpy.ix_` or slices give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A trace with its dependencies, real and typical times, and both mean step times."""

    trace: Trace
    events: tuple[Event, ...]
    work_s: Floats
    """Real time of each operation without waiting, [operation, step, dp]."""
    typical_s: Floats
    """The same for all operations of a kind: their mean, of communication the median."""
    step_time_s: float
    """Mean step of the replay with real times."""
    ideal_step_time_s: float
    """Mean step, were every operation typical."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Work out what is needed to ask.

        Raises:
            BadInputError: the trace shows no pipeline schedule, or no time passes.
        """
        trace, order = in_one_order(trace)
        events = dependencies(trace, order)
        work_s = work_of(events, trace.start_s, trace.duration_s)
        typical_s = _typical(trace, work_s)
        ideal_step_time_s = mean_step_s(events, typical_s)
        if not ideal_step_time_s > 0:
            raise BadInputError("none of its operations takes any time.")
        return cls(
            trace=trace,
            events=events,
            work_s=work_s,
            typical_s=typical_s,
            step_time_s=mean_step_s(events, work_s),
            ideal_step_time_s=ideal_step_time_s,
        )

    @property
    def slowdown(self) -> float:
        """Mean step / ideal mean step."""
        return self.step_time_s / self.ideal_step_time_s

    def slowdown_by(self, where: Where) -> float:
        """The slowdown, were only these operations as they are and all others typical."""
        times_s = self.typical_s.copy()
        times_s[where] = self.work_s[where]
        return self.slowdown_with(times_s)

    def slowdown_with(self, times_s: Floats) -> float:
        """The slowdown, did the operations take these times."""
        return mean_step_s(self.events, times_s) / self.ideal_step_time_s

    def share_of(self, where: Sequence[Where]) -> float:
        """How much of the time lost to the slowdown comes back with these operations typical."""
        times_s = self.work_s.copy()
        for chosen in where:
            times_s[chosen] = self.typical_s[chosen]
        lost_s = self.step_time_s - self.ideal_step_time_s
        return (self.step_time_s - mean_step_s(self.events, times_s)) / lost_s

    def stage(self, stage: int) -> Where:
        """All operations of a stage."""
        return self.trace.where_stage(stage)

    def worker(self, dp_rank: int, stage: int) -> Where:
        """All operations of a stage in one pipeline."""
        return np.ix_(self.stage(stage), [True] * len(self.trace.steps), [dp_rank])


def mean_step_s(events: Sequence[Event], times_s: Floats) -> float:
    """Mean step time of a replay."""
    return float(replay(events, times_s).step_s.mean())


def _typical(trace: Trace, work_s: Floats) -> Floats:
    typical_s = np.empty_like(work_s)
    for kind in {operation.kind for operation in trace.operations}:
        chosen = trace.where_kind({kind})
        middle = np.median if kind in COMMUNICATION else np.mean
        typical_s[chosen] = middle(work_s[chosen])
    return typical_s
