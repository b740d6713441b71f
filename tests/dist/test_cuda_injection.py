"""The CUDA half of the layer clock on a simulated device: late answers, a clock that drifts."""

from collections.abc import Iterator

import pytest
import torch

from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.stopwatch import CudaStopwatch
from tests.dist.slow_layers import Layer, VirtualStopwatch, run

INJECTION = Injection(entries=(InjectedRate(gpu=0, rate=2.5, from_iteration=3, to_iteration=8),))


class Device:
    """A stream on virtual time; events on it are known only when `has_passed` says so."""

    def __init__(self) -> None:
        self.time = VirtualStopwatch()
        self.cycles_per_s = 1e9
        self.has_passed = True
        self.num_events = 0

    def sleep(self, cycles: int) -> None:
        self.time.advance(cycles / self.cycles_per_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            device.num_events += 1

        def record(self) -> None:
            self.moment = device.time.now

        def query(self) -> bool:
            return device.has_passed

        def synchronize(self) -> None:
            assert device.has_passed

        def elapsed_time(self, other: "Event") -> float:
            assert device.has_passed
            return (other.moment - self.moment) * 1000

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
    yield device


class Job:
    def __init__(self, device: Device, injection: Injection | None = None) -> None:
        self.layers = [Layer(index, device.time) for index in range(2)]
        self.clock = LayerClock(gpu=0, device=torch.device("cuda"), injection=injection)
        self.clock.attach(self.layers)

    def step(self, iteration: int) -> None:
        self.clock.start_iteration(iteration)
        for _ in range(3):
            with self.clock.stage_forward():
                loss = run(self.layers, torch.ones(1, 4, requires_grad=True)).sum()
            with self.clock.stage_backward():
                loss.backward()
        self.clock.finish_iteration()

    def sample(self, iteration: int) -> Sample:
        self.step(iteration)
        sample = self.clock.read()
        assert sample is not None
        return sample


def test_times_are_the_devices(device: Device) -> None:
    sample = Job(device).sample(1)
    assert sample.layer_forward_s == pytest.approx(1.5)
    assert sample.layer_backward_s == pytest.approx(100.5)
    assert sample.stage_s == pytest.approx(1 + 2 + 100 + 101)


def test_reading_waits_for_nothing(device: Device) -> None:
    job = Job(device)
    device.has_passed = False
    for iteration in (1, 2):
        job.step(iteration)
        assert job.clock.read() is None
    device.has_passed = True
    sample = job.clock.read()
    assert sample is not None
    assert sample.iteration == 2


def test_events_are_used_again_also_by_evaluation_and_unread_iterations(device: Device) -> None:
    job = Job(device)
    job.sample(1)
    of_one_iteration = device.num_events
    device.has_passed = False
    for iteration in range(2, 12):
        job.step(iteration)
    assert device.num_events <= 6 * of_one_iteration
    device.has_passed = True
    for iteration in range(12, 20):
        job.sample(iteration)
        with torch.no_grad():
            for _ in range(100):
                run(job.layers, torch.ones(1, 4))
    assert device.num_events <= 6 * of_one_iteration


def test_injected_device_work_follows_the_layers_own_time(device: Device) -> None:
    job = Job(device, INJECTION)
    rates = {i: job.sample(i).layer_s / 102.0 for i in range(1, 10)}
    assert rates == pytest.approx(
        dict.fromkeys(range(1, 10), 1.0) | dict.fromkeys(range(3, 8), 2.5)
    )


def test_a_clock_that_drifts_is_corrected_by_the_next_iteration(device: Device) -> None:
    job = Job(device, INJECTION)
    for iteration in (1, 2, 3):
        job.sample(iteration)
    device.cycles_per_s = 0.7e9
    assert job.sample(4).layer_s / 102.0 == pytest.approx(1 + 1.5 / 0.7)
    assert job.sample(5).layer_s / 102.0 == pytest.approx(2.5)


def test_a_layer_that_grows_is_followed(device: Device) -> None:
    job = Job(device, INJECTION)
    for iteration in (1, 2, 3):
        job.sample(iteration)
    for layer in job.layers:
        layer.forward_s *= 2
        layer.backward_s *= 2
    job.sample(4)
    assert job.sample(5).layer_s / 204.0 == pytest.approx(2.5)


def test_layers_attached_anew_are_healthy_until_measured(device: Device) -> None:
    job = Job(device, INJECTION)
    for iteration in (1, 2, 3):
        job.sample(iteration)
    job.clock.attach(job.layers, tp_degree=2)
    assert job.sample(4).layer_s == pytest.approx(102.0)
    assert job.sample(5).layer_s / 102.0 == pytest.approx(2.5)


def test_the_host_is_not_asked_for_the_device(device: Device) -> None:
    assert isinstance(Job(device).clock._stopwatch, CudaStopwatch)
