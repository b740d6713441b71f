"""What one pipeline can do with given TP groups: computed once for each multiset of groups."""

from collections.abc import Iterable
from dataclasses import dataclass

from malleus_megatron.planner.costs import ROUNDING, SearchCosts
from malleus_megatron.planner.grouping import Group
from malleus_megatron.planner.layers import LayerSplit, layer_splits
from malleus_megatron.planner.orders import Order, orders, stage_specs

type Pattern = tuple[Group, ...]
"""The groups of one pipeline, sorted: pipelines with equal patterns are interchangeable."""

ALL_MICROBATCHES = 1 << 40
"""More micro-batches than any pipeline gets: nothing but the slowest stage counts."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A pipeline with its order of stages and its layers."""

    order: Order
    split: LayerSplit


class PipelineBook:
    """Layouts by pattern. `complete` tries every order of stages: exact, for few groups."""

    def __init__(self, costs: SearchCosts, *, complete: bool, least_microbatches: int = 1) -> None:
        self.costs = costs
        self.complete = complete
        self.evaluations = 0
        """Patterns solved so far: the deterministic clock of a search."""
        self._least = least_microbatches if costs.fill else ALL_MICROBATCHES
        self._layouts: dict[tuple[Pattern, int], tuple[Layout, ...]] = {}
        self._points: dict[Pattern, tuple[tuple[float, float], ...]] = {}

    def layouts(self, pattern: Pattern, most_inflight: int) -> tuple[Layout, ...]:
        """Layouts that no other one beats, smallest slowest stage first."""
        most_inflight = min(most_inflight, len(pattern)) if self.costs.limits_memory else 0
        key = (pattern, most_inflight)
        if key not in self._layouts:
            self.evaluations += 1
            self._layouts[key] = tuple(_undominated(self._all_layouts(pattern, most_inflight)))
        return self._layouts[key]

    def capacity(self, pattern: Pattern, limit_s: float) -> int:
        """Most micro-batches that the pipeline does within the limit; 0 if it can do none."""
        most = max(
            (
                self.costs.capacity(fill_s, slow_s, limit_s)
                for slow_s, fill_s in self._pairs(pattern)
            ),
            default=0,
        )
        if most >= len(pattern) or not (self.complete and self.costs.limits_memory):
            return max(0, most)
        fewer = range(len(pattern) - 1, most, -1)
        return next((m for m in fewer if self.value(pattern, m) <= limit_s), max(0, most))

    def known(self) -> list[Pattern]:
        """Every pipeline met so far that can hold the model."""
        return [pattern for pattern, pairs in self._points.items() if pairs]

    def real_capacity(self, pattern: Pattern, limit_s: float) -> float:
        """The same with fractions of micro-batches: a smooth guide for a search."""
        fill = self.costs.fill
        return max(
            ((limit_s - fill * fill_s) / slow_s + fill for slow_s, fill_s in self._pairs(pattern)),
            default=0.0,
        )

    def value(self, pattern: Pattern, num_microbatches: int) -> float:
        """The least value in seconds with so many micro-batches; inf if it does not fit."""
        layout = self.layout(pattern, num_microbatches)
        return float("inf") if layout is None else self._value(layout, num_microbatches)

    def layout(self, pattern: Pattern, num_microbatches: int) -> Layout | None:
        """The best layout with so many micro-batches."""
        layouts = self.layouts(pattern, num_microbatches)
        if not layouts:
            return None
        return min(layouts, key=lambda layout: self._value(layout, num_microbatches))

    def _value(self, layout: Layout, num_microbatches: int) -> float:
        split = layout.split
        return self.costs.value(split.fill_s, split.slowest_s, num_microbatches)

    def _pairs(self, pattern: Pattern) -> tuple[tuple[float, float], ...]:
        pairs = self._points.get(pattern)
        if pairs is None:
            layouts = self.layouts(pattern, ALL_MICROBATCHES)
            pairs = tuple((lay.split.slowest_s, lay.split.fill_s) for lay in layouts)
            self._points[pattern] = pairs
        return pairs

    def _all_layouts(self, pattern: Pattern, most_inflight: int) -> Iterable[Layout]:
        costs = self.costs
        least = self._least
        for order in orders(costs, pattern, most_inflight, complete=self.complete):
            specs = stage_specs(costs, order, most_inflight)
            for split in layer_splits(specs, costs.num_layers, least):
                yield Layout(order, split)


def _undominated(layouts: Iterable[Layout]) -> Iterable[Layout]:
    least_fill_s = float("inf")
    for layout in sorted(layouts, key=lambda lay: (lay.split.slowest_s, lay.split.fill_s)):
        if layout.split.fill_s < least_fill_s * (1 - ROUNDING):
            least_fill_s = layout.split.fill_s
            yield layout
