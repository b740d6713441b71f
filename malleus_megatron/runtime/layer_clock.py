"""A GPU's own compute time per layer and micro-batch and iteration, and what stretches it."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import nn

from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.injection import Injection
from malleus_megatron.plan.pace import Pace
from malleus_megatron.runtime.injection import CudaInjection, stretch_for
from malleus_megatron.runtime.layer_hooks import LayerHooks
from malleus_megatron.runtime.pacing import Pacer, PaceReport
from malleus_megatron.runtime.stopwatch import Mark, Stopwatch, stopwatch_for
from malleus_megatron.runtime.windows import LayerCall, Phase, Window, Windows

_KEPT_ITERATIONS = 4
_TIMED_ON_GPU = 8
"""Micro-batches of an iteration whose forwards are timed, and whose backwards: their medians say
what those of all would, and events cost the host time."""


class LayerClock:
    """Times the attached layers and the stage, and holds layers to a pace or an injected rate."""

    def __init__(
        self,
        *,
        gpu: int,
        device: torch.device,
        pace: Pace | None = None,
        injection: Injection | None = None,
    ) -> None:
        """Nothing is attached yet.

        Args:
            gpu: This rank's GPU, as injections and samples name it.
            device: A "cuda" device is timed by events on its streams, any other on the host.
            pace: Nominal layer times to hold, on CPU only.
            injection: Rates to inject; those of other GPUs are left out.

        Raises:
            BadInputError: a pace on a GPU, or an injected rate below 1 without a pace.
        """
        self.device = device
        self._gpu = gpu
        self._injection = injection or Injection()
        self._stopwatch = stopwatch_for(device)
        self._stretch = stretch_for(
            gpu=gpu,
            pace=pace,
            injection=self._injection,
            stopwatch=self._stopwatch,
        )
        self._windows = Windows(self._stopwatch)
        self._hooks = LayerHooks(self._windows, self._on_call)
        self._num_layers = 0
        self._iteration: _Iteration | None = None
        self._every = 1
        """Of so many micro-batches one is timed."""
        self._finished: deque[_Iteration] = deque()

    def attach(self, layers: Sequence[nn.Module], *, tp_degree: int = 1) -> None:
        """Time these layers instead of any others.

        A layer takes its hidden states as `hidden_states` or as its first argument, and returns
        them, alone or first in a tuple. No layer may lie inside another. What the device has not
        passed yet of others is forgotten: it would be taken for these.

        Raises:
            BadInputError: the pace has no times for this TP degree; nothing has changed then.
        """
        if self._stretch is not None:
            self._stretch.reset(tp_degree)
        while self._finished:
            self._stopwatch.give_back(self._finished.popleft().marks)
        self._hooks.attach(layers)
        self._num_layers = len(layers)

    def detach(self) -> None:
        """Take all hooks off the layers."""
        self._hooks.detach()
        self._num_layers = 0

    def start_iteration(self, iteration: int) -> None:
        """Record calls as this iteration's from now on; its injected rate holds."""
        self._recycle_marks()
        self._iteration = _Iteration(number=iteration, num_layers=self._num_layers)
        if self._stretch is not None:
            self._stretch.rate = self._injection.rate_at(self._gpu, iteration)

    def finish_iteration(self) -> None:
        """Stop recording. Calls until the next start (evaluation) are stretched, not recorded."""
        if self._iteration is None:
            return
        self._iteration.marks = self._stopwatch.take()
        if self.device.type == "cuda":
            self._every = math.ceil(max(self._iteration.num_passes.values()) / _TIMED_ON_GPU) or 1
        self._finished.append(self._iteration)
        self._iteration = None
        if len(self._finished) > _KEPT_ITERATIONS:
            self._stopwatch.give_back(self._finished.popleft().marks)

    def read(self) -> Sample | None:
        """The latest finished iteration whose times are known, once; older ones are dropped.

        Never waits for the device. None also for an iteration in which the layers or the stage
        did not run both forward and backward.
        """
        sample = None
        while self._finished and self._stopwatch.passed(self._finished[0].marks):
            iteration = self._finished.popleft()
            sample = iteration.sample(
                self._gpu, self._stopwatch, times_collectives=self.device.type == "cuda"
            )
            if isinstance(self._stretch, CudaInjection):
                self._stretch.learn(iteration.calls)
            self._stopwatch.give_back(iteration.marks)
        return sample

    def stage_forward(self) -> AbstractContextManager[None]:
        """Around the forward of one micro-batch through the whole stage."""
        return self._stage(Phase.forward)

    def stage_backward(self) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch through the whole stage."""
        return self._stage(Phase.backward)

    def pause(self) -> AbstractContextManager[None]:
        """Around what is not this GPU's compute: loading data, waiting for others."""
        return self._windows.pause()

    def pace_report(self) -> PaceReport | None:
        """How well the pace was held since the start, evaluation included; None without a pace."""
        return self._stretch.report if isinstance(self._stretch, Pacer) else None

    @contextmanager
    def _stage(self, phase: Phase) -> Iterator[None]:
        iteration = self._iteration
        is_timed = iteration is None or iteration.num_passes[phase] % self._every == 0
        self._windows.takes_marks = is_timed
        try:
            with self._windows.stage(phase) as window:
                yield
        finally:
            self._windows.takes_marks = True
        if iteration is not None:
            iteration.num_passes[phase] += 1
            if is_timed:
                iteration.stages.append(window)

    def _on_call(self, call: LayerCall) -> None:
        if self._stretch is not None:
            call.added_s = self._stretch.stretch(call)
            self._windows.hide(call, call.hidden_s)
        if self._iteration is None:
            self._recycle_marks()
        elif call.is_training and self._windows.takes_marks:
            self._iteration.calls.append(call)

    def _recycle_marks(self) -> None:
        self._stopwatch.give_back(self._stopwatch.take())


@dataclass(slots=True, kw_only=True)
class _Iteration:
    """What was recorded in one iteration; on a GPU the times are not known at first."""

    number: int
    num_layers: int
    calls: list[LayerCall] = field(default_factory=list)
    stages: list[Window] = field(default_factory=list)
    num_passes: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    """Micro-batches that went through the stage, timed or not."""
    marks: list[Mark] = field(default_factory=list)

    def sample(self, gpu: int, stopwatch: Stopwatch, *, times_collectives: bool) -> Sample | None:
        """The medians, once the device has passed all marks.

        On CPU collectives are not timed: what passes there is other processes' work on the cores.
        """
        layer = _seconds_by_phase(self.calls, stopwatch)
        stage = _seconds_by_phase(self.stages, stopwatch)
        if not all(layer.values()) or not all(stage.values()):
            return None
        calls = len(layer[Phase.forward]) * self.num_passes[Phase.forward]
        return Sample(
            gpu=gpu,
            iteration=self.number,
            layer_forward_s=median(layer[Phase.forward]),
            layer_backward_s=median(layer[Phase.backward]),
            stage_forward_s=median(stage[Phase.forward]),
            stage_backward_s=median(stage[Phase.backward]),
            num_layers=self.num_layers,
            num_microbatches=calls // len(stage[Phase.forward]) // self.num_layers,
            layer_collectives_s=self._collectives_s(stopwatch) if times_collectives else 0.0,
        )

    def _collectives_s(self, stopwatch: Stopwatch) -> float:
        return sum(
            median(call.paused_s(stopwatch) for call in self.calls if call.phase is phase)
            for phase in Phase
        )


def _seconds_by_phase(
    measured: Sequence[LayerCall] | Sequence[Window], stopwatch: Stopwatch
) -> dict[Phase, list[float]]:
    seconds: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    for item in measured:
        seconds[item.phase].append(item.total_s(stopwatch))
    return seconds
