"""A probe's time: it follows injected rates, takes a pace's time, and is told once."""

import statistics
from collections.abc import Iterator

import pytest
import torch

from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.pace import LayerPace, Pace
from malleus_megatron.runtime.probe import Probe

CPU = torch.device("cpu")
PACE = Pace(
    by_degree=(
        (1, LayerPace(forward_s=0.08, backward_s=0.16)),
        (2, LayerPace(forward_s=0.04, backward_s=0.08)),
    )
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As every rank of a job has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow_from(iteration: int, rate: float) -> Injection:
    entry = InjectedRate(gpu=3, rate=rate, from_iteration=iteration, to_iteration=None)
    return Injection(entries=(entry,))


def times_s(probe: Probe, iteration: int, number: int = 3) -> float:
    found = []
    for _ in range(number):
        probe.run(iteration)
        time_s = probe.time_s()
        assert time_s is not None
        found.append(time_s)
    return statistics.median(found)


def test_a_probe_leaves_nothing_behind() -> None:
    """A GPU may be on standby for weeks, probed at every step."""
    probe = Probe(gpu=3, device=CPU)
    for iteration in range(1, 4):
        probe.run(iteration)
    for tensor in (probe._layer.input, probe._layer.gradient, probe._layer.weight):
        assert not tensor._backward_hooks
        assert tensor.grad is None


@pytest.mark.parametrize("rate", [1.5, 2.57])
def test_the_rate_of_a_paced_probe_is_the_injected_one(rate: float) -> None:
    probe = Probe(gpu=3, device=CPU, pace=PACE, injection=slow_from(5, rate))
    healthy_s = times_s(probe, 4)
    assert healthy_s == pytest.approx(0.06, rel=0.05)
    assert times_s(probe, 5) / healthy_s == pytest.approx(rate, rel=0.05)


def test_without_a_pace_an_injection_stretches_it_and_other_gpus_are_left_alone() -> None:
    slow = Probe(gpu=3, device=CPU, injection=slow_from(5, 4.0))
    other = Probe(gpu=2, device=CPU, injection=slow_from(5, 4.0))
    slow_s, before_s = times_s(slow, 5, 9), times_s(slow, 4, 9)
    # A busy machine moves such short times: only the order is sure.
    assert slow_s > 1.5 * before_s
    assert times_s(other, 5, 9) < slow_s


def test_a_probe_is_told_once_and_leaves_no_gradients() -> None:
    probe = Probe(gpu=3, device=CPU)
    assert probe.time_s() is None
    probe.run(1)
    assert probe.time_s() is not None
    assert probe.time_s() is None
    assert probe._layer.input.grad is None
