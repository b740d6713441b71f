"""Replaying a step: when everything would have ended, had each operation taken a given time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from malleus_megatron.whatif.dependencies import Event
from malleus_megatron.whatif.rows import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Start (with waiting for peers) and end of every operation, [operation, step, dp]."""

    start_s: Floats
    end_s: Floats

    @property
    def step_s(self) -> Floats:
        """Of each step."""
        step_s: Floats = self.end_s.max(axis=(0, 2))
        return step_s


def replay(events: Sequence[Event], work_s: Floats) -> Replay:
    """Start each operation when all that it needs has ended.

    Args:
        events: From `dependencies`.
        work_s: Time of each operation without waiting, [operation, step, dp].
    """
    start_s, end_s = np.zeros_like(work_s), np.zeros_like(work_s)
    for event in events:
        for index, needs in zip(event.operations, event.needs, strict=True):
            for need in needs:
                np.maximum(start_s[index], end_s[need], out=start_s[index])
        begin_s = begin_of(event, start_s)
        for index in event.operations:
            np.add(begin_s, work_s[index], out=end_s[index])
    return Replay(start_s=start_s, end_s=end_s)


def begin_of(event: Event, start_s: Floats) -> Floats:
    """When an event's work begins, [step, dp]: a collective's when its last member has started."""
    begin_s: Floats = start_s[event.operations[0]]
    if event.together:
        for index in event.operations[1:]:
            begin_s = np.maximum(begin_s, start_s[index])
        if event.across_pipelines:
            begin_s = np.broadcast_to(begin_s.max(axis=1, keepdims=True), begin_s.shape)
    return begin_s


def work_of(events: Sequence[Event], start_s: Floats, duration_s: Floats) -> Floats:
    """The part of each measured time that is not waiting for peers, [operation, step, dp].

    A transfer or collective works from the latest start among its members to its own end. A clock
    that is slightly off can put its end before that: then it is 0.
    """
    work_s = duration_s.copy()
    for event in events:
        if event.together:
            begin_s = begin_of(event, start_s)
            for index in event.operations:
                end_s = start_s[index] + duration_s[index]
                work_s[index] = np.maximum(end_s - begin_s, 0.0)
    return work_s
