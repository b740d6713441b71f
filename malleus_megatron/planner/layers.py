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
        layers, fill_s = walk.fill()
        if not splits or fill_s < splits[-1].fill_s * (1 - ROUNDING):
            slowest_s = max([(n + s.extra) * s.y_s for n, s in zip(layers, stages, strict=True)])
            splits.append(LayerSplit(slowest_s, fill_s, tuple(layers)))
        if fill_s <= walk.least_fill_s * (1 + ROUNDING):
            break
        rise_s = (walk.limit_s - splits[0].slowest_s) * (least_microbatches - 1)
        if rise_s > splits[0].fill_s - walk.least_fill_s:
            break
    return splits


class _Walk:
    """The limit b, rising, and how many layers each stage may have below it."""

    def __init__(self, stages: Sequence[StageSpec], num_layers: int) -> None:
        self.stages = stages
        self.rest = num_layers - len(stages)
        """Layers beyond the one that every stage has."""
        self.fastest_first = sorted(range(len(stages)), key=lambda j: (stages[j].y_s, j))
        self.ones_s = sum([(1 + s.extra) * s.y_s for s in stages])
        even_s = num_layers + sum([s.extra for s in stages])
        even_s /= sum([1 / s.y_s for s in stages])
        self.limit_s = max([even_s, *[(1 + s.extra) * s.y_s for s in stages]])
        slack = 1 + ROUNDING / 10
        self.allowed = [
            max(1, min(s.max_layers, int(self.limit_s / s.y_s * slack - s.extra))) for s in stages
        ]
        self.rises = [
            (self._rise_s(j), j) for j, s in enumerate(stages) if self.allowed[j] < s.max_layers
        ]
        heapq.heapify(self.rises)
        self.marginal_s = float("inf")
        """Layer time of the slowest stage with more than one layer."""
        _, self.least_fill_s = self._fill([stage.max_layers for stage in stages])
        self.started = False

    def advance(self) -> bool:
        """Raise b to the next value at which the layers fit and the fill may fall."""
        if not self.started:
            self.started = True
            missing = self.rest + len(self.stages) - sum(self.allowed)
            while missing > 0:
                missing -= len(self._rise())
            return True
        while self.rises:
            if any(self.stages[j].y_s < self.marginal_s for j in self._rise()):
                return True
        return False

    def fill(self) -> tuple[list[int], float]:
        """The layers with least fill under the present limit, and that fill."""
        return self._fill(self.allowed)

    def _rise(self) -> list[int]:
        """Allow one more layer wherever the next limit does; the stages that may have it."""
        self.limit_s = self.rises[0][0]
        risen = []
        while self.rises and self.rises[0][0] <= self.limit_s * (1 + ROUNDING / 10):
            _, j = heapq.heappop(self.rises)
            risen.append(j)
            self.allowed[j] += 1
            if self.allowed[j] < self.stages[j].max_layers:
                heapq.heappush(self.rises, (self._rise_s(j), j))
        return risen

    def _rise_s(self, j: int) -> float:
        return (self.allowed[j] + 1 + self.stages[j].extra) * self.stages[j].y_s

    def _fill(self, allowed: Sequence[int]) -> tuple[list[int], float]:
        layers = [1] * len(self.stages)
        rest = self.rest
        fill_s = self.ones_s
        for j in self.fastest_first:
            if rest == 0:
                break
            taken = min(allowed[j] - 1, rest)
            layers[j] += taken
            rest -= taken
            fill_s += taken * self.stages[j].y_s
            self.marginal_s = self.stages[j].y_s
        return layers, fill_s


def evened(stages: Sequence[StageSpec], split: LayerSplit) -> LayerSplit:
    """The same split with equally fast stages as equal as may be: neither figure changes for worse.

    A layer moves from the fuller of two stages of equal y to the emptier one while that leaves it
    below; so the heaviest stage gets lighter, in time and in memory.
    """
    layers = list(split.layers)

    def load(j: int) -> float:
        return layers[j] + stages[j].extra

    moved = True
    while moved:
        moved = False
        for y_s in {stage.y_s for stage in stages}:
            alike = [j for j, stage in enumerate(stages) if stage.y_s == y_s]
            room = [j for j in alike if layers[j] < stages[j].max_layers]
            source = max((j for j in alike if layers[j] > 1), key=load, default=None)
            target = min(room, key=lambda j: (load(j), -j), default=None)
            if source is not None and target is not None and load(source) > load(target) + 1:
                layers[source] -= 1
                layers[target] += 1
                moved = True
    return LayerSplit(split.slowest_s, split.fill_s, tuple(layers))
