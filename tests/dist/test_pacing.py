"""Pace and injection on CPU: exact on a clock that only layers and sleeps move, and for real."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from malleus_megatron.detector.samples import Sample
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.pace import LayerPace, Pace
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.pacing import PaceReport, Sleeper
from malleus_megatron.runtime.windows import Phase
from tests.dist.slow_layers import Layer, VirtualStopwatch, run

CPU = torch.device("cpu")
PACE = Pace(
    by_degree=(
        (1, LayerPace(forward_s=8.0, backward_s=160.0)),
        (2, LayerPace(forward_s=4.0, backward_s=120.0)),
    )
)
SLOW = Injection(entries=(InjectedRate(gpu=1, rate=2.5, from_iteration=2, to_iteration=3),))
FAST = Injection(entries=(InjectedRate(gpu=1, rate=0.75, from_iteration=1),))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> VirtualStopwatch:
    virtual = VirtualStopwatch()
    monkeypatch.setattr(time, "perf_counter", virtual.mark)
    monkeypatch.setattr(time, "sleep", virtual.advance)
    return virtual


def recomputed(layers: Any, hidden_states: Tensor) -> Tensor:
    return checkpoint(run, layers, hidden_states, use_reentrant=True)


def step(
    clock: LayerClock,
    layers: Sequence[Layer],
    iteration: int = 1,
    through: Callable[[Any, Tensor], Tensor] = run,
) -> Sample:
    clock.start_iteration(iteration)
    for _ in range(10):
        with clock.stage_forward():
            loss = through(layers, torch.ones(1, 4, requires_grad=True)).sum()
        with clock.stage_backward():
            loss.backward()
    clock.finish_iteration()
    sample = clock.read()
    assert sample is not None
    return sample


def layers_and_clock(
    world: VirtualStopwatch, *, tp_degree: int = 1, **options: Any
) -> tuple[list[Layer], LayerClock]:
    layers = [Layer(index, world) for index in range(2)]
    clock = LayerClock(gpu=1, device=CPU, **options)
    clock.attach(layers, tp_degree=tp_degree)
    return layers, clock


class Waiting(Layer):
    """A layer that waits for others in its forward."""

    clock: LayerClock
    waited_s: float

    def passes(self, phase: str, seconds: float) -> None:
        super().passes(phase, seconds)
        if phase == "forward":
            with self.clock.pause():
                self.stopwatch.advance(self.waited_s)


@pytest.mark.parametrize("waited_s", [3.0, 6.5, 50.0])
def test_a_wait_inside_a_layer_passes_in_its_time(world: VirtualStopwatch, waited_s: float) -> None:
    layers = [Waiting(index, world) for index in range(2)]
    clock = LayerClock(gpu=1, device=CPU, pace=PACE)
    for layer in layers:
        layer.clock, layer.waited_s = clock, waited_s
    clock.attach(layers, tp_degree=1)
    sample = step(clock, layers)
    assert (sample.layer_forward_s, sample.layer_backward_s) == (8.0, 160.0)
    assert (sample.stage_forward_s, sample.stage_backward_s) == (16.0, 320.0)
    forward_s = sum(max(8.0, layer.forward_s + waited_s) for layer in layers)
    assert world.now == 10 * (forward_s + 2 * 160.0)


@pytest.mark.parametrize("through", [run, recomputed])
def test_layers_are_held_to_the_pace_recomputation_included(
    world: VirtualStopwatch, through: Callable[[Any, Tensor], Tensor]
) -> None:
    layers, clock = layers_and_clock(world, pace=PACE)
    sample = step(clock, layers, through=through)
    assert (sample.layer_forward_s, sample.layer_backward_s) == (8.0, 160.0)
    assert (sample.stage_forward_s, sample.stage_backward_s) == (16.0, 320.0)
    assert world.now == 10 * 2 * (8.0 + 160.0)
    assert clock.pace_report() == PaceReport(num_calls=40)


def test_a_tp_degree_has_its_own_pace(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, tp_degree=2, pace=PACE)
    assert step(clock, layers).layer_s == 124.0
    clock.attach(layers, tp_degree=1)
    assert step(clock, layers).layer_s == 168.0


def test_a_wait_that_lasts_longer_than_the_layer_comes_on_top(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, pace=PACE)

    def wait(*args: Any) -> None:
        with clock.pause():
            world.advance(1000.0)

    layers[0].linear.register_forward_hook(wait)
    sample = step(clock, layers)
    assert (sample.layer_forward_s, sample.stage_forward_s) == (8.0, 16.0)
    assert world.now == 10 * (layers[0].forward_s + 1000.0 + 8.0 + 2 * 160.0)


def test_injection_scales_the_pace_in_its_iterations_only(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, pace=PACE, injection=SLOW)
    times = [step(clock, layers, iteration).layer_s for iteration in (1, 2, 3)]
    assert times == [168.0, 2.5 * 168.0, 168.0]


def test_a_pace_can_make_a_gpu_faster(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, pace=PACE, injection=FAST)
    assert step(clock, layers).layer_s == 0.75 * 168.0


def test_another_gpus_injection_changes_nothing(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, injection=SLOW)
    other = LayerClock(gpu=0, device=CPU, injection=SLOW)
    clock.detach()
    other.attach(layers)
    assert step(other, layers, iteration=2).layer_s == 1.5 + 100.5


def test_without_a_pace_injection_scales_the_real_work(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, injection=SLOW)
    times = [step(clock, layers, iteration).layer_s for iteration in (1, 2, 3)]
    assert times == [102.0, 2.5 * 102.0, 102.0]
    assert clock.pace_report() is None


def test_evaluation_is_paced_and_not_recorded(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, pace=PACE, injection=SLOW)
    step(clock, layers, iteration=2)
    before = world.now
    with torch.no_grad(), clock.stage_forward():
        run([layer.eval() for layer in layers], torch.ones(1, 4))
    assert world.now - before == 2.5 * 16.0
    assert clock.read() is None


def test_a_pace_that_cannot_be_held_is_reported_with_its_numbers(world: VirtualStopwatch) -> None:
    layers, clock = layers_and_clock(world, pace=PACE)
    layers[1].forward_s = 20.0
    layers[0].forward_s = 8.3  # within 5 %
    layers[0].backward_s = 170.0
    sample = step(clock, layers)
    assert sample.stage_forward_s == pytest.approx(28.3)
    report = clock.pace_report()
    assert report == PaceReport(
        num_calls=40,
        num_missed=20,
        worst_phase=Phase.forward,
        worst_target_s=8.0,
        worst_needed_s=20.0,
    )
    assert report.worst_ratio == 2.5
    assert "20 of 40 layer calls" in report.message()
    assert "took 20.0000 s instead of 8.0000 s" in report.message()


def test_a_late_sleep_is_made_up_in_small_parts(
    world: VirtualStopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        world.advance(seconds + (0.5 if len(asked) == 1 else 0.0))

    monkeypatch.setattr(time, "sleep", sleep)
    sleeper = Sleeper()
    for _ in range(6):
        sleeper.sleep(0.05)
    assert asked == pytest.approx([0.05, 0.0475, 0.0475, 0.0475, 0.0475, 0.05])
    assert sleeper.sleep(0.0) == sleeper.sleep(-1.0) == 0.0
    assert len(asked) == 6


def test_real_sleeps_scale_with_the_rate() -> None:
    """In real time, on a machine that may be busy: the ratio within one run, by medians."""
    pace = Pace(by_degree=((1, LayerPace(forward_s=0.01, backward_s=0.02)),))
    layers = [Layer(index, VirtualStopwatch()) for index in range(2)]
    clock = LayerClock(gpu=1, device=CPU, pace=pace, injection=SLOW)
    clock.attach(layers)
    healthy, slow = step(clock, layers, iteration=1), step(clock, layers, iteration=2)
    assert slow.layer_s / healthy.layer_s == pytest.approx(2.5, rel=0.2)
    assert healthy.stage_s >= 0.9 * 2 * 0.03
