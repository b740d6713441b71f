"""Two ranks of a TP group: the fast one waits inside its layer, and its compute time shows none."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from malleus_megatron.detector.samples import Sample
from malleus_megatron.runtime import layer_clock
from malleus_megatron.runtime.layer_clock import LayerClock
from malleus_megatron.runtime.patching import Installed
from malleus_megatron.runtime.stopwatch import HostStopwatch
from malleus_megatron.runtime.waits import wait_rows
from tests.harness.ranks import run_ranks

SLOW_S = 0.05


def all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def all_reduce_by_handle(tensor: Tensor) -> None:
    handle = dist.all_reduce(tensor, async_op=True)
    assert isinstance(handle, dist.Work)
    handle.wait()


def all_gather(tensor: Tensor) -> None:
    dist.all_gather_single(tensor.new_empty(2 * tensor.numel()), tensor.flatten())


def reduce_scatter_by_handle(tensor: Tensor) -> None:
    doubled = torch.cat([tensor.flatten(), tensor.flatten()])
    dist.reduce_scatter_single(tensor.flatten().clone(), doubled, async_op=True).wait()


def send_and_receive(tensor: Tensor) -> None:
    other = 1 - dist.get_rank()
    operations = [
        dist.P2POp(dist.isend, tensor, other),
        dist.P2POp(dist.irecv, torch.empty_like(tensor), other),
    ]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()


COLLECTIVES = (
    all_reduce,
    all_reduce_by_handle,
    all_gather,
    reduce_scatter_by_handle,
    send_and_receive,
)
DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("cuda")}


class Reduce(torch.autograd.Function):
    """A collective in forward and one in backward, rank 1 late for both."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, collective: Callable[[Tensor], None]) -> Tensor:
        ctx.collective = collective
        Reduce.meet(hidden_states.clone(), collective)
        return hidden_states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Reduce.meet(gradient.clone(), ctx.collective)
        return gradient.clone(), None

    @staticmethod
    def meet(tensor: Tensor, collective: Callable[[Tensor], None]) -> None:
        if dist.get_rank() == 1:
            time.sleep(SLOW_S)
        collective(tensor)


class Layer(nn.Module):
    def __init__(self, collective: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.collective = collective

    def forward(self, hidden_states: Tensor) -> Tensor:
        reduced: Tensor = Reduce.apply(hidden_states, self.collective)
        return reduced


def measure(with_waits: bool, device: str = "cpu") -> list[Sample]:
    """Of each collective. A "cuda" clock has a host's stopwatch: all else is as on a GPU."""
    times = []
    for collective in COLLECTIVES:
        clock = layer_clock_of(DEVICES[device])
        layer = Layer(collective)
        clock.attach([layer])
        rows = Installed(wait_rows(clock) if with_waits else ())
        clock.start_iteration(1)
        for _ in range(3):
            dist.barrier()
            with clock.stage_forward():
                loss = layer(torch.ones(4, requires_grad=True)).sum()
            with clock.stage_backward():
                loss.backward()
        clock.finish_iteration()
        rows.uninstall()
        sample = clock.read()
        assert sample is not None
        times.append(sample)
    return times


def layer_clock_of(device: torch.device) -> LayerClock:
    with mock.patch.object(layer_clock, "stopwatch_for", return_value=HostStopwatch()):
        return LayerClock(gpu=dist.get_rank(), device=device)


def parts(sample: Sample) -> tuple[float, float, float]:
    return sample.layer_forward_s, sample.layer_backward_s, sample.stage_forward_s


@pytest.mark.dist
@pytest.mark.parametrize("device", DEVICES)
def test_waiting_for_a_slow_rank_is_not_compute(device: str) -> None:
    fast, slow = run_ranks(2, measure, True, device)
    for collective, mine, late in zip(COLLECTIVES, fast, slow, strict=True):
        for fast_s, slow_s in zip(parts(mine), parts(late), strict=True):
            assert slow_s > SLOW_S, collective
            assert fast_s < SLOW_S / 4, collective
        if device == "cuda":
            assert mine.layer_collectives_s > 1.5 * SLOW_S, collective
            assert late.layer_collectives_s < SLOW_S / 2, collective
        else:
            assert mine.layer_collectives_s == 0.0


@pytest.mark.dist
def test_without_the_rows_both_ranks_look_slow() -> None:
    fast, _ = run_ranks(2, measure, False)
    assert all(seconds > SLOW_S / 2 for sample in fast for seconds in parts(sample))
