"""The layer clock on a real GPU: times, no waiting for the device, injection. `make gpu-check`."""

import time
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.probe import Probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_LAYERS = 4
NUM_MICROBATCHES = 4
SLOW = Injection(entries=(InjectedRate(gpu=0, rate=2.5, from_iteration=5),))


class Layer(nn.Module):
    """Matrix products of some milliseconds: the device is busy, the host runs ahead of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        for linear in self.linear:
            hidden_states = torch.tanh(linear(hidden_states))
        return hidden_states, None


class Job:
    def __init__(self, injection: Injection | None = None) -> None:
        torch.manual_seed(0)
        device = torch.device("cuda", torch.cuda.current_device())
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS)).to(device)
        self.input = torch.randn(2048, 4096, device=device, requires_grad=True)
        self.clock = LayerClock(gpu=0, device=device, injection=injection)
        self.clock.attach(list(self.layers))

    def forward(self) -> Tensor:
        hidden_states = self.input
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states=hidden_states)
        return hidden_states.sum()

    def step(self, iteration: int) -> None:
        self.clock.start_iteration(iteration)
        for _ in range(NUM_MICROBATCHES):
            with self.clock.stage_forward():
                loss = self.forward()
            with self.clock.stage_backward():
                loss.backward()
        self.clock.finish_iteration()

    def sample(self, iteration: int) -> Sample:
        self.step(iteration)
        return self.measured()

    def measured(self) -> Sample:
        """Once the device has passed the iteration that was finished last."""
        torch.cuda.synchronize()
        sample = self.clock.read()
        assert sample is not None
        return sample


def test_layer_times_are_the_devices() -> None:
    job = Job()
    for iteration in range(1, 4):
        sample = job.sample(iteration)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.no_grad():
        start.record()
        for _ in range(NUM_MICROBATCHES):
            job.forward()
        end.record()
        end.synchronize()
    direct_s = start.elapsed_time(end) / 1000 / NUM_MICROBATCHES / NUM_LAYERS
    assert sample.num_layers == NUM_LAYERS
    assert sample.num_microbatches == NUM_MICROBATCHES
    assert sample.layer_forward_s == pytest.approx(direct_s, rel=0.2)
    assert 1.5 < sample.layer_backward_s / sample.layer_forward_s < 3.0
    assert sample.stage_forward_s == pytest.approx(NUM_LAYERS * sample.layer_forward_s, rel=0.2)
    assert sample.stage_backward_s == pytest.approx(NUM_LAYERS * sample.layer_backward_s, rel=0.2)


def test_reading_does_not_wait_for_the_device() -> None:
    job = Job()
    job.sample(1)
    torch.cuda._sleep(int(2e9))  # around a second
    job.step(2)
    start = time.perf_counter()
    assert job.clock.read() is None
    assert time.perf_counter() - start < 0.1
    torch.cuda.synchronize()
    sample = job.clock.read()
    assert sample is not None
    assert sample.iteration == 2


def test_a_pause_on_the_host_is_not_compute() -> None:
    job = Job()
    job.sample(1)
    job.clock.start_iteration(2)
    with job.clock.stage_forward():
        with job.clock.pause():
            torch.cuda.synchronize()
            time.sleep(0.3)
        loss = job.forward()
    with job.clock.stage_backward():
        loss.backward()
    job.clock.finish_iteration()
    sample = job.measured()
    assert sample.stage_forward_s < 0.15 + NUM_LAYERS * sample.layer_forward_s


class Waiting(torch.autograd.Function):
    """The identity; its backward waits on the stream, as a head's does for its TP group."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, clock: LayerClock) -> Tensor:
        ctx.clock = clock
        return hidden_states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.clock.pause():
            torch.cuda._sleep(int(1e9))  # around half a second
        return gradient.clone(), None


def test_a_wait_on_the_stream_in_a_backward_is_not_compute() -> None:
    """Autograd runs it on a thread of its own."""
    job = Job()
    usual = job.sample(1)
    job.clock.start_iteration(2)
    with job.clock.stage_forward():
        loss = Waiting.apply(job.forward(), job.clock)
    with job.clock.stage_backward():
        loss.backward()
    job.clock.finish_iteration()
    sample = job.measured()
    assert sample.stage_backward_s < 2 * usual.stage_backward_s + 0.05


def test_a_probe_takes_the_same_time_after_thousands() -> None:
    probe = Probe(gpu=0, device=torch.device("cuda", torch.cuda.current_device()))

    def time_s(iteration: int) -> float:
        torch.cuda.synchronize()
        probe.run(iteration)
        torch.cuda.synchronize()
        found = probe.time_s()
        assert found is not None
        return found

    times = [time_s(iteration) for iteration in range(3000)]
    assert median(times[-100:]) == pytest.approx(median(times[100:200]), rel=0.05)


def test_an_injected_rate_is_measured_as_it_was_asked() -> None:
    job = Job(SLOW)
    healthy = [job.sample(iteration).layer_s for iteration in range(1, 5)][-1]
    slow = [job.sample(iteration).layer_s for iteration in range(5, 10)][-1]
    assert slow / healthy == pytest.approx(2.5, rel=0.15)


def test_hooks_and_injection_change_no_bit() -> None:
    def gradients(injection: Injection | None, watch: bool) -> list[Tensor]:
        job = Job(injection)
        if not watch:
            job.clock.detach()
        for iteration in range(4, 7):
            job.step(iteration)
            torch.cuda.synchronize()
            job.clock.read()
        return [p.grad for p in [*job.layers.parameters(), job.input] if p.grad is not None]

    plain = gradients(None, watch=False)
    for hooked in (gradients(None, watch=True), gradients(SLOW, watch=True)):
        assert len(hooked) == len(plain) == 4 * NUM_LAYERS + 1
        assert all(torch.equal(one, other) for one, other in zip(plain, hooked, strict=True))


def test_events_are_used_again() -> None:
    job = Job()
    for iteration in range(1, 4):
        job.sample(iteration)
    pool = len(job.clock._stopwatch._pool)  # type: ignore[attr-defined]
    job.sample(4)
    assert len(job.clock._stopwatch._pool) == pool  # type: ignore[attr-defined]
