"""Marks in time on the host or on a GPU's stream, and the seconds between two of them."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

type Mark = Any
"""A moment: seconds as a float on the host, a recorded `torch.cuda.Event` on a GPU."""


class Stopwatch(Protocol):
    """Takes marks now; tells the seconds between them when the device has passed them."""

    def mark(self) -> Mark:
        """The present moment of the host, or of the current stream."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks that the device has passed."""

    def take(self) -> list[Mark]:
        """All marks since the last call, to be given back when they have been read."""

    def passed(self, marks: Sequence[Mark]) -> bool:
        """True if the device has passed all of them. Never waits for it."""

    def give_back(self, marks: Sequence[Mark]) -> None:
        """Let these marks be used again."""


class HostStopwatch:
    """`time.perf_counter`: on CPU the work is done when the call returns."""

    def mark(self) -> Mark:
        """The present moment."""
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks."""
        return float(end - start)

    def take(self) -> list[Mark]:
        """Nothing has to be given back."""
        return []

    def passed(self, marks: Sequence[Mark]) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def give_back(self, marks: Sequence[Mark]) -> None:
        """Nothing to do."""


class CudaStopwatch:
    """CUDA events on the current stream, taken from a pool, never waited for.

    Inside a backward pass autograd makes the stream of the forward pass current, also on its own
    thread, so that marks land between the kernels they belong to.
    """

    def __init__(self) -> None:
        """An empty pool; events are made when they are first needed."""
        self._pool: list[torch.cuda.Event] = []
        self._taken: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        """Record an event."""
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._taken.append(event)
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Device time between two events."""
        return float(start.elapsed_time(end)) / 1000

    def take(self) -> list[Mark]:
        """All events since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def passed(self, marks: Sequence[Mark]) -> bool:
        """Query the events, the latest first: it is the likeliest to be outstanding."""
        return all(event.query() for event in reversed(marks))

    def give_back(self, marks: Sequence[Mark]) -> None:
        """Return events to the pool."""
        self._pool.extend(marks)


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
