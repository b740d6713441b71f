"""Layers to the stages of one pipeline, exactly: the trade between fill and slowest stage."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.planner.costs import ROUNDING


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What matters of a stage: time per layer y, extra layers e, most layers that fit."""

    y_s: float
    extra: float
    max_layers: int


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A split that no other one beats in both figures."""

    slowest_s: float
    """max_j (l_j + e_j) y_j"""
    fill_s: float
    """sum_j (l_j + e_j) y_j"""
    layers: tuple[int, ...]


def layer_splits(
    stages: Sequence[StageSpec], num_layers: int, least_microbatches: int
) -> list[LayerSplit]:
    """All splits worth having with at least so many micro-batches, smallest slowest stage first.

    For a limit b on the slowest stage, stage j takes at most min(max_j, floor(b / y_j - e_j))
    layers, and then the fill is least if the fastest stages are filled first: fill is linear in
    the layers. Only b = (l + e_j) y_j can matter, so b walks through these, from the least one at
    which all layers fit. It stops when a further rise of b costs the micro-batches more than the
    fill can still fall. Empty if the layers do not fit or a stage would get none.
    """
    if len(stages) > num_layers or sum(s.max_layers for s in stages) < num_layers:
        return []
    if min(stage.max_layers for stage in stages) < 1:
        return []
    walk = _Walk(stages, num_layers)
    splits: list[LayerSplit] = []
    while walk.advance():
        split = walk.split()
        if not splits or split.fill_s < splits[-1].fill_s * (1 - ROUNDING):
            splits.append(split)
        if split.fill_s <= walk.least_fill_s * (1 + ROUNDING):
            break
        rise_s = (walk.limit_s - splits[0].slowest_s) * (least_microbatches - 1)
        if rise_s > splits[0].fill_s - walk.least_fill_s:
            break
    return splits


class _Walk:
    """The limit b, rising, and how many layers each stage may have below it."""

    def __init__(self, stages: Sequence[StageSpec], num_layers: int) -> None:
        self.stages = stages
        self.num_layers = num_layers
        self.fastest_first = sorted(range(len(stages)), key=lambda j: (stages[j].y_s, j))
        even_s = (num_layers + sum(s.extra for s in stages)) / sum(1 / s.y_s for s in stages)
        self.limit_s = max(even_s, *((1 + s.extra) * s.y_s for s in stages))
        slack = 1 + ROUNDING / 10
        self.allowed = [
            max(1, min(s.max_layers, int(self.limit_s / s.y_s * slack - s.extra))) for s in stages
        ]
        self.rises = [
            (self._rise_s(j), j) for j, s in enumerate(stages) if self.allowed[j] < s.max_layers
        ]
        heapq.heapify(self.rises)
        self.started = False
        unlimited = self._fill([stage.max_layers for stage in stages])
        self.least_fill_s = self._fill_s(unlimited)

    def advance(self) -> bool:
        """Raise b to the next value at which the layers fit and the fill may fall."""
        if not self.started:
            self.started = True
            while sum(self.allowed) < self.num_layers:
                self._rise()
            return True
        if not self.rises:
            return False
        self._rise()
        return True

    def split(self) -> LayerSplit:
        """The split with least fill under the present limit."""
        layers = self._fill(self.allowed)
        slowest_s = max((n + s.extra) * s.y_s for n, s in zip(layers, self.stages, strict=True))
        return LayerSplit(slowest_s, self._fill_s(layers), tuple(layers))

    def _rise(self) -> None:
        """Allow one more layer wherever the next limit does."""
        self.limit_s = self.rises[0][0]
        while self.rises and self.rises[0][0] <= self.limit_s * (1 + ROUNDING / 10):
            _, j = heapq.heappop(self.rises)
            self.allowed[j] += 1
            if self.allowed[j] < self.stages[j].max_layers:
                heapq.heappush(self.rises, (self._rise_s(j), j))

    def _rise_s(self, j: int) -> float:
        return (self.allowed[j] + 1 + self.stages[j].extra) * self.stages[j].y_s

    def _fill(self, allowed: Sequence[int]) -> list[int]:
        layers = [1] * len(self.stages)
        rest = self.num_layers - len(layers)
        for j in self.fastest_first:
            taken = min(allowed[j] - 1, rest)
            layers[j] += taken
            rest -= taken
        return layers

    def _fill_s(self, layers: Sequence[int]) -> float:
        return sum((n + s.extra) * s.y_s for n, s in zip(layers, self.stages, strict=True))
