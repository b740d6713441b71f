"""Measuring windows: a stretch of time, less what happened inside that is not its own."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch

from malleus_megatron.runtime.stopwatch import Mark, Stopwatch

STAGE = -1
"""In place of a layer's index: the whole stage."""


class Phase(StrEnum):
    """The two halves of a training step's compute."""

    forward = "forward"
    backward = "backward"


@dataclass(slots=True, eq=False, kw_only=True)
class Window:
    """One measured stretch of one layer, or of the whole stage."""

    phase: Phase
    start: Mark
    thread: int
    layer: int
    """Index among the attached layers, or STAGE."""
    worked: Mark = None
    """When its own work was done, before anything was added on purpose."""
    end: Mark = None
    excluded: tuple[tuple[Mark, Mark], ...] = ()
    """Other windows inside this one."""
    pauses: tuple[tuple[Mark, Mark], ...] = ()
    hidden_s: float = 0.0
    """Of the pauses: what passed while its layers were still at work, by the pace."""

    def own_s(self, stopwatch: Stopwatch) -> float:
        """Seconds of its own work."""
        return self._until(self.worked, stopwatch)

    def total_s(self, stopwatch: Stopwatch) -> float:
        """Seconds of its own work and of what was added to it."""
        return self._until(self.end, stopwatch) + self.hidden_s

    def paused_s(self, stopwatch: Stopwatch) -> float:
        """Seconds that it waited."""
        return sum(stopwatch.seconds(*pair) for pair in self.pauses)

    def _until(self, moment: Mark, stopwatch: Stopwatch) -> float:
        elapsed = stopwatch.seconds(self.start, moment)
        return elapsed - sum(stopwatch.seconds(*pair) for pair in (*self.excluded, *self.pauses))


@dataclass(slots=True, eq=False, kw_only=True)
class LayerCall:
    """A forward of a layer and a micro-batch, or its backward with all recomputation for it."""

    windows: Sequence[Window]
    """Of one layer; the last one is the forward or backward itself."""
    is_training: bool
    """False in evaluation."""
    added_s: float = 0.0
    """What was added on purpose, in seconds asked for."""
    hidden_s: float = 0.0
    """What of its pauses passed in its own time, by the pace."""

    @property
    def layer(self) -> int:
        """Index among the attached layers."""
        return self.windows[-1].layer

    @property
    def phase(self) -> Phase:
        """Which half of the step it is."""
        return self.windows[-1].phase

    def own_s(self, stopwatch: Stopwatch) -> float:
        """Seconds of the layer's own work."""
        return sum(window.own_s(stopwatch) for window in self.windows)

    def paused_s(self, stopwatch: Stopwatch) -> float:
        """Seconds that the layer waited inside."""
        return sum(window.paused_s(stopwatch) for window in self.windows)

    def total_s(self, stopwatch: Stopwatch) -> float:
        """Seconds with what was added."""
        return sum(window.total_s(stopwatch) for window in self.windows)


class Windows:
    """The windows that are open on this GPU: one of the stage, and a stack of its layers'.

    A layer window inside another (a layer recomputed while a later one's backward runs) is taken
    out of the outer one; a pause is taken out of the innermost one and of the stage's.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        """Nothing is open."""
        self._stopwatch = stopwatch
        self._layers: list[Window] = []
        self._stage: Window | None = None
        self._paused = False
        self.takes_marks = True
        """False: windows open and close as ever, and nobody will ask how long they were."""

    @property
    def innermost(self) -> Window | None:
        """The layer window that was opened last and is still open."""
        return self._layers[-1] if self._layers else None

    def drop_layers(self) -> None:
        """Forget open layer windows: what they belonged to has ended without closing them."""
        self._layers.clear()

    def open(self, layer: int, phase: Phase) -> Window:
        """Start measuring a layer."""
        window = self._new(phase, layer)
        self._layers.append(window)
        return window

    def is_open(self, window: Window) -> bool:
        """True until it is closed or dropped."""
        return window in self._layers

    def work_done(self, window: Window) -> None:
        """What happens in the window from now on is added to the layer's own work."""
        window.worked = self._mark()

    def hide(self, call: LayerCall, seconds: float) -> None:
        """Count so much of a call's pauses as its work, and as its stage's."""
        call.windows[-1].hidden_s += seconds
        if self._stage is not None:
            self._stage.hidden_s += seconds

    def close(self, window: Window) -> None:
        """End a layer window that is open."""
        self._layers.remove(window)
        window.end = self._mark()
        if window.worked is None:
            window.worked = window.end
        if self._layers:
            self._layers[-1].excluded += ((window.start, window.end),)

    @contextmanager
    def stage(self, phase: Phase) -> Iterator[Window]:
        """Measure the whole stage's part of one micro-batch."""
        window = self._stage = self._new(phase, STAGE)
        try:
            yield window
        finally:
            self._stage = None
            window.worked = window.end = self._mark()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of the open windows, if it is part of their work.

        A backward on a GPU runs on a thread of autograd's; what other threads wait for, a
        checkpoint's writer say, stretches no window.
        """
        inner = self.innermost or self._stage
        if self._paused or inner is None or not _works_in(inner):
            yield
            return
        self._paused = True
        start = self._mark()
        try:
            yield
        finally:
            self._paused = False
            pair = (start, self._mark())
            inner.pauses += (pair,)
            if self._stage is not None and self._stage is not inner:
                self._stage.pauses += (pair,)

    def _new(self, phase: Phase, layer: int) -> Window:
        return Window(phase=phase, layer=layer, start=self._mark(), thread=threading.get_ident())

    def _mark(self) -> Mark:
        return self._stopwatch.mark() if self.takes_marks else None


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def _works_in(window: Window) -> bool:
    is_its_backward = window.phase is Phase.backward and in_backward()
    return is_its_backward or window.thread == threading.get_ident()
