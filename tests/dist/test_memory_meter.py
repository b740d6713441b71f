"""The CPU's memory meter against sums that can be worked out by hand."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from malleus_megatron.runtime.memory import CpuMeter
from malleus_megatron.runtime.storages import storage_bytes

WIDTH, ROWS, LAYERS = 256, 100, 4
ACTIVATION = 4 * WIDTH * ROWS
WEIGHT = 4 * WIDTH * WIDTH


@pytest.fixture(autouse=True)
def still() -> Iterator[None]:
    """What other tests left in cycles is freed before the meter counts, and not while it does."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Square(nn.Module):
    """y = (x W)^2: keeps x and x W for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x @ self.weight) ** 2
        return y


def test_what_a_forward_pass_leaves_behind_is_counted() -> None:
    model = nn.Sequential(*(Square() for _ in range(LAYERS)))
    meter = CpuMeter()
    with meter.watched():
        base = meter.now_bytes()
        assert base >= LAYERS * WEIGHT
        output = model(torch.randn(ROWS, WIDTH))
        # The input, and of every layer x W and y.
        assert meter.now_bytes() - base == (1 + 2 * LAYERS) * ACTIVATION
        output.sum().backward()
        del output
        # The gradients are left.
        assert meter.now_bytes() - base == LAYERS * WEIGHT
        at_end = meter.now_bytes()
    assert meter.now_bytes() == 0
    least = base + (1 + 2 * LAYERS) * ACTIVATION
    assert least < meter.peak_bytes() < least + LAYERS * WEIGHT + 4 * ACTIVATION
    assert meter.peak_bytes() > at_end


def test_tensors_that_share_a_storage_count_once_and_freed_ones_not_at_all() -> None:
    kept = torch.zeros(1000)
    meter = CpuMeter()
    with meter.watched():
        base = meter.now_bytes()
        view = kept[10:].view(10, 99)
        assert meter.now_bytes() == base
        copy = view.clone()
        assert meter.now_bytes() == base + 4 * 990
        del copy
        assert meter.now_bytes() == base
        del kept, view
        assert meter.now_bytes() == base - 4000
    assert meter.peak_bytes() == base + 4 * 990
    with meter.watched():
        assert meter.now_bytes() < base
    assert meter.peak_bytes() < base


def test_the_values_of_a_watched_step_are_the_same() -> None:
    torch.manual_seed(1)
    model, data = Square(), torch.randn(ROWS, WIDTH)
    plain = torch.autograd.grad(model(data).sum(), model.weight)[0]
    with CpuMeter().watched():
        watched = torch.autograd.grad(model(data).sum(), model.weight)[0]
    assert torch.equal(plain, watched)


def test_storage_bytes() -> None:
    whole = torch.zeros(100, dtype=torch.float64)
    assert storage_bytes([whole[:10], whole[50:], torch.zeros(5)]) == 800 + 20
    assert storage_bytes([]) == 0
