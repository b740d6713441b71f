"""Samples of an iteration: medians, counts, what is left out, and when there is none."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from malleus_megatron.detector.samples import Sample
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.pace import LayerPace, Pace
from malleus_megatron.runtime import layer_clock
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.waits import timed, wait_rows
from tests.dist.slow_layers import Layer, VirtualStopwatch, run

CPU = torch.device("cpu")
PACE = Pace(by_degree=((1, LayerPace(forward_s=0.01, backward_s=0.02)),))


class Job:
    """A clock on virtual time, its layers, and steps of some micro-batches."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_layers: int = 3, device: torch.device = CPU
    ) -> None:
        self.stopwatch = VirtualStopwatch()
        monkeypatch.setattr(layer_clock, "stopwatch_for", lambda device: self.stopwatch)
        self.clock = LayerClock(gpu=5, device=device)
        self.layers = [Layer(index, self.stopwatch) for index in range(num_layers)]
        self.clock.attach(self.layers)

    def forward(self) -> Tensor:
        with self.clock.stage_forward():
            with self.clock.pause():
                self.stopwatch.advance(50.0)
            self.stopwatch.advance(10.0)
            return run(self.layers, torch.ones(1, 4, requires_grad=True)).sum()

    def backward(self, loss: Tensor) -> None:
        with self.clock.stage_backward():
            loss.backward()
            self.stopwatch.advance(20.0)

    def step(self, iteration: int, num_microbatches: int) -> None:
        self.clock.start_iteration(iteration)
        for _ in range(num_microbatches):
            self.backward(self.forward())
        self.clock.finish_iteration()


def test_a_sample_holds_medians_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.step(7, num_microbatches=4)
    assert job.clock.read() == Sample(
        gpu=5,
        iteration=7,
        layer_forward_s=2.0,
        layer_backward_s=101.0,
        stage_forward_s=10.0 + 1.0 + 2.0 + 3.0,
        stage_backward_s=20.0 + 100.0 + 101.0 + 102.0,
        num_layers=3,
        num_microbatches=4,
    )
    assert job.clock.read() is None


def test_medians_pass_over_one_odd_call(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, num_layers=1)
    job.clock.start_iteration(1)
    for forward_s in (1.0, 900.0, 1.5):
        job.layers[0].forward_s = forward_s
        job.backward(job.forward())
    job.clock.finish_iteration()
    sample = job.clock.read()
    assert sample is not None
    assert (sample.layer_forward_s, sample.stage_forward_s) == (1.5, 11.5)


def test_the_latest_iteration_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for iteration in range(1, 10):
        job.step(iteration, num_microbatches=1)
    sample = job.clock.read()
    assert sample is not None
    assert sample.iteration == 9


def test_iterations_that_the_device_has_not_passed_are_kept_but_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch)
    given_back: list[int] = []
    monkeypatch.setattr(job.stopwatch, "take", lambda: [0.0])
    monkeypatch.setattr(job.stopwatch, "give_back", lambda marks: given_back.append(len(marks)))
    monkeypatch.setattr(job.stopwatch, "passed", lambda marks: False)
    for iteration in range(1, 8):
        job.step(iteration, num_microbatches=1)
        assert job.clock.read() is None
    assert len(given_back) == 7 + (7 - 4)
    monkeypatch.setattr(job.stopwatch, "passed", lambda marks: True)
    sample = job.clock.read()
    assert sample is not None
    assert sample.iteration == 7
    assert len(given_back) == 7 + 7


def test_evaluation_is_not_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.step(1, num_microbatches=2)
    with torch.no_grad():
        job.forward()  # between iterations
    job.clock.start_iteration(2)
    for layer in job.layers:
        layer.forward_s = 1.0
    job.backward(job.forward())
    with torch.no_grad():
        for layer in job.layers:
            layer.eval()
            layer.forward_s = 77.0
        run(job.layers, torch.ones(1, 4))
    job.clock.finish_iteration()
    sample = job.clock.read()
    assert sample is not None
    assert (sample.iteration, sample.num_microbatches, sample.layer_forward_s) == (2, 1, 1.0)


def test_no_sample_without_layers_or_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.clock.start_iteration(1)
    job.forward()
    job.clock.finish_iteration()
    assert job.clock.read() is None
    job.clock.detach()
    job.step(2, num_microbatches=1)
    assert job.clock.read() is None
    job.clock.finish_iteration()
    assert job.clock.read() is None


def test_other_layers_are_attached_after_a_reshape(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.step(1, num_microbatches=1)
    former = job.layers
    job.layers = [Layer(index, job.stopwatch) for index in range(2)]
    job.clock.attach(job.layers, tp_degree=2)
    job.step(2, num_microbatches=3)
    sample = job.clock.read()
    assert sample is not None
    assert (sample.num_layers, sample.num_microbatches) == (2, 3)
    assert not any(layer._forward_hooks for layer in former)


def test_a_failed_micro_batch_does_not_reach_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)

    def fails(*args: Any) -> None:
        raise ValueError("bad data")

    job.clock.start_iteration(1)
    with pytest.raises(ValueError, match="bad data"), job.clock.stage_forward(), job.clock.pause():
        fails()
    job.backward(job.forward())
    job.clock.finish_iteration()
    sample = job.clock.read()
    assert sample is not None
    assert sample.stage_forward_s == 16.0


def test_a_timed_function_is_the_same_and_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)

    def reduce(tensor: str, *, scale: int = 1) -> str:
        """Reduce."""
        job.stopwatch.advance(1000.0)
        return tensor * scale

    wrapped = timed(job.clock, reduce)
    assert (wrapped.__name__, wrapped.__doc__) == ("reduce", "Reduce.")
    job.clock.start_iteration(1)
    job.layers[0].register_forward_hook(lambda *_: wrapped("x", scale=2) and None)
    job.backward(job.forward())
    job.clock.finish_iteration()
    assert wrapped("x", scale=2) == "xx"
    sample = job.clock.read()
    assert sample is not None
    assert sample.stage_forward_s == 16.0


@pytest.mark.parametrize(("num_microbatches", "timed"), [(5, 5), (8, 8), (64, 8), (70, 8)])
def test_on_a_gpu_few_micro_batches_of_many_are_timed(
    monkeypatch: pytest.MonkeyPatch, num_microbatches: int, timed: int
) -> None:
    """Events and their reading cost the host time, which must not grow with the step."""
    job = Job(monkeypatch, device=torch.device("cuda"))
    job.step(1, num_microbatches)
    marks: list[float] = []

    def mark() -> float:
        marks.append(job.stopwatch.now)
        return marks[-1]

    monkeypatch.setattr(job.stopwatch, "mark", mark)
    job.step(2, num_microbatches)
    sample = job.clock.read()
    assert sample is not None
    assert sample.iteration == 2
    assert sample.num_microbatches == num_microbatches
    assert (sample.layer_forward_s, sample.stage_forward_s) == (2.0, 16.0)
    # Of a micro-batch: two windows of the stage, a pause and six of layers with one mark more.
    assert len(marks) == timed * (2 * 2 + 2 + 6 * 3)


def test_a_pace_needs_the_cpu_and_its_degree() -> None:
    with pytest.raises(BadInputError, match="TP degree 4; it has 1"):
        LayerClock(gpu=0, device=CPU, pace=PACE).attach([], tp_degree=4)
    with pytest.raises(BadInputError, match="CPU mode only"):
        LayerClock(gpu=0, device=torch.device("cuda"), pace=PACE)


def test_only_a_pace_can_make_a_gpu_faster() -> None:
    faster = Injection(entries=(InjectedRate(gpu=1, rate=0.5, from_iteration=3),))
    with pytest.raises(BadInputError, match=r"GPU 1: rate 0\.5 is below 1"):
        LayerClock(gpu=1, device=CPU, injection=faster)
    with pytest.raises(BadInputError, match=r"GPU 1: rate 0\.5 is below 1"):
        LayerClock(gpu=1, device=torch.device("cuda"), injection=faster)
    LayerClock(gpu=0, device=CPU, injection=faster)
    LayerClock(gpu=1, device=CPU, injection=faster, pace=PACE)


def test_on_a_gpu_the_streams_waits_in_collectives_are_replaced_too() -> None:
    module = "torch.distributed.distributed_c10d"
    assert [row.target for row in wait_rows(LayerClock(gpu=0, device=CPU))] == [
        f"{module}.Work.wait"
    ]
    on_gpu = wait_rows(LayerClock(gpu=0, device=torch.device("cuda")))
    targets = [row.target for row in on_gpu]
    assert targets[:2] == [f"{module}.Work.wait", f"{module}.ProcessGroup.allreduce"]
    assert [row.target for row in on_gpu if not row.optional] == [f"{module}.Work.wait"]
    # A stage's batch comes by broadcast; sequence parallelism reduces and scatters.
    names = {target.rpartition(".")[2] for target in targets}
    assert names >= {"broadcast", "reduce_scatter", "allgather", "_allgather_base"}


class _Collective(torch.autograd.Function):
    """The identity, whose backward waits, as that of a vocabulary-parallel head does."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, job: Job) -> Tensor:
        ctx.job = job
        return hidden_states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.job.clock.pause():
            ctx.job.stopwatch.advance(5000.0)
        return gradient.clone(), None


@pytest.mark.parametrize("of_the_engine", [False, True])
def test_a_wait_outside_the_layers_is_no_compute_on_the_engines_thread_either(
    monkeypatch: pytest.MonkeyPatch, *, of_the_engine: bool
) -> None:
    """On a GPU the backward runs on a thread of autograd's own."""
    job = Job(monkeypatch)

    def backward(loss: Tensor) -> None:
        runs = threading.Thread(target=loss.backward) if of_the_engine else None
        with job.clock.stage_backward():
            if runs is None:
                loss.backward()
            else:
                runs.start()
                runs.join()
            job.stopwatch.advance(20.0)

    job.clock.start_iteration(1)
    backward(_Collective.apply(job.forward(), job))
    job.clock.finish_iteration()
    sample = job.clock.read()
    assert sample is not None
    assert sample.stage_backward_s == 323.0


def test_what_another_thread_waits_for_is_nothing_of_the_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer of a checkpoint, say, while a backward runs."""
    job = Job(monkeypatch)

    def write() -> None:
        with job.clock.pause():
            job.stopwatch.advance(5.0)

    job.clock.start_iteration(1)
    loss = job.forward()
    with job.clock.stage_backward():
        loss.backward()
        writer = threading.Thread(target=write)
        writer.start()
        writer.join()
    job.clock.finish_iteration()
    sample = job.clock.read()
    assert sample is not None
    assert sample.stage_backward_s == 308.0


def test_on_a_gpu_a_sample_tells_what_collectives_took(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, device=torch.device("cuda"))

    def collective(*_: Any) -> None:
        with job.clock.pause():
            job.stopwatch.advance(7.0)

    for layer in job.layers:
        layer.register_forward_hook(collective, prepend=True)
    job.step(1, num_microbatches=2)
    sample = job.clock.read()
    assert sample is not None
    assert sample.layer_collectives_s == 7.0
    assert sample.layer_forward_s == 2.0
    assert sample.stage_forward_s == 16.0


def test_what_the_device_has_not_passed_of_other_layers_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under another plan it would be taken for a time of the layers that are there now."""
    job = Job(monkeypatch)
    job.step(7, num_microbatches=2)
    job.clock.attach(job.layers[:2])
    assert job.clock.read() is None
    job.layers = job.layers[:2]
    job.step(8, num_microbatches=2)
    sample = job.clock.read()
    assert sample is not None
    assert (sample.iteration, sample.num_layers, sample.num_microbatches) == (8, 2, 2)
