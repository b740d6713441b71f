"""Small layers that take a known time on a clock that only they move."""

from typing import Any

import torch
from torch import Tensor, nn


class VirtualStopwatch:
    """Time stands still but for `advance`, so that every measured second is exact."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def take(self) -> list[float]:
        return []

    def passed(self, marks: Any) -> bool:
        return True

    def give_back(self, marks: Any) -> None:
        pass


class _Work(torch.autograd.Function):
    """The identity, which says when it runs and lets time pass."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, layer: "Layer") -> Tensor:
        ctx.layer = layer
        layer.passes("forward", layer.forward_s)
        return hidden_states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.passes("backward", ctx.layer.backward_s)
        return gradient.clone(), None


class Layer(nn.Module):
    """A residual layer whose forward and backward take `forward_s` and `backward_s`."""

    def __init__(self, index: int, stopwatch: VirtualStopwatch, output: str = "tensor") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.index = index
        self.stopwatch = stopwatch
        self.output = output
        self.forward_s = 1.0 + index
        self.backward_s = 100.0 + index

    def passes(self, phase: str, seconds: float) -> None:
        self.stopwatch.advance(seconds)
        self.stopwatch.log.append(f"{phase} {self.index}")

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, None]:
        hidden_states = hidden_states + self.linear(_Work.apply(hidden_states, self))
        return (hidden_states, None) if self.output == "tuple" else hidden_states


def run(layers: Any, hidden_states: Tensor, by: str = "position") -> Tensor:
    """Pass through the layers; the hidden states go in by position or by keyword."""
    for layer in layers:
        out = layer(hidden_states=hidden_states) if by == "keyword" else layer(hidden_states)
        hidden_states = out[0] if isinstance(out, tuple) else out
    return hidden_states
