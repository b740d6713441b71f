"""TP groups of a node: the cuts worth considering. Equal nodes are solved once.

Why sorted consecutive blocks are enough: take any cut of a node, its groups G_1, G_2, ... ordered
by their rate. The GPUs of G_1..G_i all have rates <= rate(G_i), so the s_1 + ... + s_i fastest GPUs
of the node do too. Giving G_1 the s_1 fastest, G_2 the next s_2, and so on, makes no group slower.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isinf

from malleus_megatron.plan.problem import Problem

type Group = tuple[int, float]
"""TP size and rate (that of its slowest GPU): groups that agree in both are interchangeable."""
type Cut = tuple[Group, ...]
"""Groups of one node, sorted."""

MAX_CUTS = 300
"""More partial cuts of a node than this are not carried on."""
FEW_RATES = 6
COARSENESS = 1.4
BUCKETS = 8
"""More than a few different rates are made so many for the bound, or within this factor as one."""
MAX_COMPARED = 300
"""Up to so many cuts are compared with each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Nodes with the same rates."""

    rates: tuple[float, ...]
    """Of the GPUs that have not failed, ascending."""
    nodes: tuple[int, ...]


def node_classes(problem: Problem) -> tuple[NodeClass, ...]:
    """Nodes by their rates, whatever the nodes' and the GPUs' numbers."""
    rates = problem.counted_rates()
    nodes: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for node, gpus in enumerate(problem.cluster.nodes()):
        usable = sorted(rates[gpu] for gpu in gpus if not isinf(rates[gpu]))
        nodes[tuple(usable)].append(node)
    return tuple(NodeClass(rates=key, nodes=tuple(nodes[key])) for key in sorted(nodes))


def coarse_classes(classes: tuple[NodeClass, ...]) -> tuple[NodeClass, ...]:
    """The same nodes with few different rates, none slower than it is: a relaxation.

    Rare rates within a factor are taken as the lowest of them. Making GPUs faster makes no plan
    slower, so a lower bound for these nodes is one for the true ones.
    """
    number: dict[float, int] = defaultdict(int)
    for node_class in classes:
        for rate in node_class.rates:
            number[rate] += len(node_class.nodes)
    if len(number) <= FEW_RATES:
        return classes
    common = sorted(number, key=lambda rate: (-number[rate], rate))[:1]
    rare = sorted(rate for rate in number if rate not in common)
    factor = min(COARSENESS, (rare[-1] / rare[0]) ** (1 / BUCKETS))
    lowest: dict[float, float] = {}
    base = 0.0
    for rate in sorted(number):
        if rate in common or rate > base * factor or base in common:
            base = rate
        lowest[rate] = base
    nodes: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for node_class in classes:
        nodes[tuple(sorted(lowest[rate] for rate in node_class.rates))] += node_class.nodes
    return tuple(NodeClass(rates=key, nodes=tuple(nodes[key])) for key in sorted(nodes))


def cuts(
    rates: tuple[float, ...], sizes: Iterable[int], time_by_degree: Mapping[int, float]
) -> tuple[Cut, ...]:
    """The cuts of a node that no other one dominates, most throughput first.

    Args:
        rates: Of the node's GPUs, ascending.
        sizes: Allowed TP sizes.
        time_by_degree: A healthy layer's time, to tell throughput.
    """
    ordered = sorted(sizes)

    def throughput(cut: Cut) -> float:
        return sum(1 / (time_by_degree[size] * rate) for size, rate in cut)

    partial: list[set[Cut]] = [{()}, *(set() for _ in rates)]
    for start in range(len(rates)):
        kept = _diverse(partial[start], throughput)
        for size in ordered:
            end = start + size
            if end <= len(rates):
                group = (size, rates[end - 1])
                partial[end] |= {tuple(sorted((*cut, group))) for cut in kept}
    ended = range(max(0, len(rates) - ordered[0] + 1), len(rates) + 1)
    found = _diverse({cut for end in ended for cut in partial[end]}, throughput)
    return tuple(_undominated(found))


def _diverse(found: set[Cut], throughput: Callable[[Cut], float]) -> list[Cut]:
    """All cuts, best first, if they are few; else the best of each number of groups, in turn.

    Many small groups have most throughput, few large ones least fill: both must stay.
    """
    ranked = sorted(found, key=lambda cut: (-throughput(cut), cut))
    if len(ranked) <= MAX_CUTS:
        return ranked
    turns: dict[int, int] = defaultdict(int)
    by_turn = []
    for cut in ranked:
        by_turn.append((turns[len(cut)], cut))
        turns[len(cut)] += 1
    by_turn.sort(key=lambda pair: pair[0])
    return [cut for _, cut in by_turn[:MAX_CUTS]]


def _undominated(found: list[Cut]) -> list[Cut]:
    """Drop each cut for whose every group another cut has one of the same size, not slower."""
    if len(found) > MAX_COMPARED:
        return found
    rates_by_size = [_rates_by_size(cut) for cut in found]
    return [
        cut
        for i, cut in enumerate(found)
        if not any(
            i != j and _covers(rates_by_size[j], rates_by_size[i]) and (found[j] != cut)
            for j in range(len(found))
        )
    ]


def _rates_by_size(cut: Cut) -> dict[int, list[float]]:
    rates: dict[int, list[float]] = defaultdict(list)
    for size, rate in cut:
        rates[size].append(rate)
    return rates


def _covers(better: dict[int, list[float]], worse: dict[int, list[float]]) -> bool:
    return all(
        len(better.get(size, ())) >= len(rates)
        and all(b <= w for b, w in zip(better[size], rates, strict=False))
        for size, rates in worse.items()
    )
