"""When a GPU begins and ends the operations of a step: marks on its stopwatch, read afterwards."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from malleus_megatron.runtime.stopwatch import HostStopwatch, Mark, stopwatch_for

Span = tuple[str, float, float]
"""Name, start and end in seconds on this host's clock."""


class OperationTrace:
    """Records named spans between `begin` and `end`; outside of them it does nothing."""

    def __init__(self, device: torch.device) -> None:
        """Record nothing yet.

        Args:
            device: A "cuda" device is timed by events on its streams, any other on the host.
        """
        self.is_on = False
        self._stopwatch = stopwatch_for(device)
        self._is_host = isinstance(self._stopwatch, HostStopwatch)
        self._begun_s = 0.0
        self._begin: Mark = None
        self._open: dict[str, Mark] = {}
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._pauses: list[tuple[float, float]] = []
        self._pause_from_s: float | None = None

    def begin(self) -> None:
        """Record from now on. On a GPU, waits until it has done what it was given before.

        Only so is it known what its events' times are on this host's clock.
        """
        self._spans, self._pauses, self._open = [], [], {}
        self._begin = self._stopwatch.mark()
        if not self._is_host:
            self._begin.synchronize()
        self._begun_s = time.perf_counter()
        gc.callbacks.append(self._on_collection)
        self.is_on = True

    def start(self, name: str) -> None:
        """A span begins; one of the same name that was never stopped is forgotten."""
        self._open[name] = self._stopwatch.mark()

    def stop(self, name: str) -> None:
        """It ends."""
        started = self._open.pop(name, None)
        if started is not None:
            self._spans.append((name, started, self._stopwatch.mark()))

    def end(self) -> None:
        """Record no more; `read` gives what there is."""
        if self.is_on:
            self.is_on = False
            gc.callbacks.remove(self._on_collection)

    def read(self, collection: str) -> list[Span]:
        """All spans, in order of their ends. On a GPU, waits until it has passed the last one.

        Garbage collections come as one span, the last, as long as all of them together: on the
        host's clock the spans in which they happened are so much shorter. On a GPU they hold up
        the host, which may or may not show.

        Args:
            collection: The name of that span.
        """
        marks = self._stopwatch.take()
        if marks and not self._is_host:
            marks[-1].synchronize()
        spans = [
            (name, self._on_clock(started), self._on_clock(ended))
            for name, started, ended in self._spans
        ]
        self._stopwatch.give_back(marks)
        paused_s = sum(until_s - from_s for from_s, until_s in self._pauses)
        if self._is_host:
            spans = [_without(span, self._pauses) for span in spans]
        last_s = max((ended_s for _, _, ended_s in spans), default=self._begun_s)
        return [*spans, (collection, last_s - paused_s, last_s)]

    def _on_clock(self, mark: Mark) -> float:
        return self._begun_s + self._stopwatch.seconds(self._begin, mark)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:  # noqa: ARG002
        now_s = time.perf_counter()
        if phase == "start":
            self._pause_from_s = now_s
        elif self._pause_from_s is not None:
            self._pauses.append((self._pause_from_s, now_s))
            self._pause_from_s = None


def _without(span: Span, pauses: Sequence[tuple[float, float]]) -> Span:
    name, start_s, end_s = span
    inside_s = sum(until_s - from_s for from_s, until_s in pauses if start_s <= from_s < end_s)
    return name, start_s, max(start_s, end_s - inside_s)
