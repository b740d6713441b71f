"""Which node and which GPU: so that state stays where it is.

Both are assignment problems, solved exactly (OR-Tools) where a plan is in use; else GPUs are taken
in order, the fastest first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malleus_megatron.plan.problem import Problem
from malleus_megatron.planner.grouping import Group, NodeClass

UNIT = 1 << 20
"""One whole layer, as an integer cost."""


@dataclass(frozen=True, slots=True)
class Place:
    """A group to be filled: its kind, its layers, and where it stands in the plan."""

    group: Group
    layers: tuple[int, int]
    seat: tuple[int, int]


class Holdings:
    """What each GPU holds now: layers, and which part of each."""

    def __init__(self, problem: Problem) -> None:
        self.rates = problem.counted_rates()
        self.raw = dict(problem.rates.by_gpu)
        self.nodes = problem.cluster.nodes()
        self.held: dict[int, tuple[tuple[int, int], float, float]] = {}
        current = problem.current_plan
        for pipeline in current.pipelines if current is not None else ():
            for stage in pipeline.stages:
                size = len(stage.gpus)
                for rank, gpu in enumerate(stage.gpus):
                    self.held[gpu] = (stage.layers, rank / size, (rank + 1) / size)

    def kept(self, gpu: int, place: Place, rank: int) -> float:
        """How much of the place's state, in layers, the GPU has already."""
        if gpu not in self.held:
            return 0.0
        layers, low, high = self.held[gpu]
        size = place.group[0]
        common = min(layers[1], place.layers[1]) - max(layers[0], place.layers[0])
        part = min(high, (rank + 1) / size) - max(low, rank / size)
        return max(0, common) * max(0.0, part)


def assign_nodes(
    holdings: Holdings, node_class: NodeClass, work: Sequence[tuple[Place, ...]]
) -> list[tuple[Place, ...]]:
    """The groups of each of the class's nodes, so that most state is in its node already."""
    if not holdings.held or len(work) < 2:
        return list(work)
    have = [_layers_held(holdings, node) for node in node_class.nodes]
    need = [_layers_needed(places) for places in work]
    known: dict[tuple[object, object], int] = {}
    costs = []
    for row, held in enumerate(have):
        for column, wanted in enumerate(need):
            key = (held, wanted)
            if key not in known:
                shared = dict(held)
                known[key] = round(
                    UNIT * sum(min(part, shared.get(layer, 0.0)) for layer, part in wanted)
                )
            costs.append((row, column, -known[key] * len(work) + abs(row - column)))
    chosen = _assignment(costs, len(work))
    return [work[chosen[row]] for row in range(len(work))]


def assign_gpus(
    holdings: Holdings, node: int, places: Sequence[Place]
) -> dict[tuple[int, int], tuple[int, ...]]:
    """GPUs of a node for its groups: none slower than its group's rate."""
    gpus = sorted(
        (gpu for gpu in holdings.nodes[node] if holdings.rates[gpu] < float("inf")),
        key=lambda gpu: (holdings.rates[gpu], holdings.raw.get(gpu, 1.0), gpu),
    )
    ordered = sorted(
        places, key=lambda p: (p.group[1], p.layers[0] - p.layers[1], p.layers, p.seat)
    )
    ranks = [(place, rank) for place in ordered for rank in range(place.group[0])]
    if not any(gpu in holdings.held for gpu in gpus):
        chosen = dict(enumerate(gpus[: len(ranks)]))
    else:
        chosen = _least_moved(holdings, gpus, ranks)
    named: dict[tuple[int, int], list[int]] = {place.seat: [] for place in places}
    for index, (place, _) in enumerate(ranks):
        named[place.seat].append(chosen[index])
    return {seat: tuple(members) for seat, members in named.items()}


def _least_moved(
    holdings: Holdings, gpus: Sequence[int], ranks: Sequence[tuple[Place, int]]
) -> dict[int, int]:
    """Rank index -> GPU. Rows beyond the ranks are standby; near places win ties."""
    number = len(gpus)
    costs = []
    for row in range(number):
        for column, gpu in enumerate(gpus):
            cost = abs(row - column)
            if row < len(ranks):
                place, rank = ranks[row]
                if holdings.rates[gpu] > place.group[1]:
                    continue
                cost -= round(UNIT * holdings.kept(gpu, place, rank)) * number
            costs.append((row, column, cost))
    chosen = _assignment(costs, number)
    return {row: gpus[chosen[row]] for row in range(len(ranks))}


def _assignment(costs: Sequence[tuple[int, int, int]], size: int) -> dict[int, int]:
    """The cheapest one-to-one assignment of rows to columns."""
    from ortools.graph.python import linear_sum_assignment  # noqa: PLC0415 (slow to import)

    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    for row, column, cost in costs:
        solver.add_arc_with_cost(row, column, cost)
    if solver.solve() != solver.OPTIMAL:
        raise AssertionError(f"no assignment of {size} rows, though the plan's cuts allow one")
    return {row: solver.right_mate(row) for row in range(size)}


def _layers_held(holdings: Holdings, node: int) -> tuple[tuple[int, float], ...]:
    parts: dict[int, float] = {}
    for gpu in holdings.nodes[node]:
        if gpu in holdings.held:
            (start, end), low, high = holdings.held[gpu]
            for layer in range(start, end):
                parts[layer] = parts.get(layer, 0.0) + high - low
    return _rounded(parts)


def _layers_needed(places: Sequence[Place]) -> tuple[tuple[int, float], ...]:
    parts: dict[int, float] = {}
    for place in places:
        for layer in range(*place.layers):
            parts[layer] = parts.get(layer, 0.0) + 1.0
    return _rounded(parts)


def _rounded(parts: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((layer, round(part, 6)) for layer, part in parts.items()))
