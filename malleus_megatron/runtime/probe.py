"""The rate of a GPU that trains nothing: a layer of our own, timed as the model's layers are.

A probe's time on a GPU over its time on healthy ones of the same kind is the GPU's straggling
rate. It is timed, paced and slowed down by a layer clock, so that it means what it means in a step.
"""

import torch
from torch import Tensor, nn

from malleus_megatron.detector.smoothing import layer_time_s
from malleus_megatron.plan.injection import Injection
from malleus_megatron.plan.pace import LayerPace, Pace
from malleus_megatron.runtime.layer_clock import LayerClock

NUM_PASSES = 3
"""Of one probe; their median counts."""
_WIDTH_CUDA, _WIDTH_CPU = 4096, 64
_NUM_PRODUCTS = 8
_PACE_SHARE = 0.25


class Probe:
    """Runs a short load on this rank's GPU and tells how long it took."""

    def __init__(
        self,
        *,
        gpu: int,
        device: torch.device,
        pace: Pace | None = None,
        injection: Injection | None = None,
    ) -> None:
        """Allocate the load: on a GPU 96 MiB, which stay.

        Args:
            gpu: This rank's, as injections name it.
            device: Where it runs.
            pace: In CPU mode, what layers take: a pass of the probe then takes a quarter of one of
                the least TP degree.
            injection: Rates to inject.
        """
        held = None if pace is None else _shortened(pace)
        self._clock = LayerClock(gpu=gpu, device=device, pace=held, injection=injection)
        on_gpu = device.type == "cuda"
        self._layer = _Load(
            _WIDTH_CUDA if on_gpu else _WIDTH_CPU,
            device,
            torch.bfloat16 if on_gpu else torch.float32,
        )
        self._clock.attach([self._layer])

    def run(self, iteration: int) -> None:
        """Start a probe; on a GPU it is only queued.

        Args:
            iteration: Whose injected rate holds.
        """
        clock = self._clock
        clock.start_iteration(iteration)
        with torch.enable_grad():
            for _ in range(NUM_PASSES):
                # A leaf of each pass: the clock's hooks on it end with the pass.
                hidden_states = self._layer.input.detach().requires_grad_()
                with clock.stage_forward():
                    out = self._layer(hidden_states)
                with clock.stage_backward():
                    out.backward(self._layer.gradient)
        clock.finish_iteration()

    def time_s(self) -> float | None:
        """Of the last probe that the device has ended, once; never waits. None: no news."""
        sample = self._clock.read()
        return None if sample is None else layer_time_s(sample)


def _shortened(pace: Pace) -> Pace:
    """Short, since the other ranks wait for a standby GPU that is still at its probe."""
    _, layer = pace.by_degree[0]
    short = LayerPace(
        forward_s=_PACE_SHARE * layer.forward_s, backward_s=_PACE_SHARE * layer.backward_s
    )
    return Pace(by_degree=((1, short),))


class _Load(nn.Module):
    """Matrix products, which keep the compute units busy, and sums that memory bounds."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        eye = torch.eye(width, device=device, dtype=dtype)
        self.weight = nn.Parameter(eye, requires_grad=False)
        self.input = torch.ones_like(eye)
        self.gradient = torch.ones_like(eye)

    def forward(self, hidden_states: Tensor) -> Tensor:
        for _ in range(_NUM_PRODUCTS):
            hidden_states = torch.matmul(hidden_states, self.weight)
            hidden_states = hidden_states + self.input
        return hidden_states
