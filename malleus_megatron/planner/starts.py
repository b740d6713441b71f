"""First plans for a local search: cut the nodes by prices, deal the groups to the pipelines."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.grouping import Cut, Group
from malleus_megatron.planner.state import State, supply_of

type NodeCuts = Sequence[tuple[Sequence[Cut], int]]
"""For each class of equal nodes, its cuts and its number of nodes."""


def best_cuts(
    node_cuts: NodeCuts, times: Mapping[int, float], fill_price: float
) -> tuple[tuple[tuple[Cut, int], ...], ...]:
    """Cut every node for the most price, where a group of layer time y is worth 1 / y - fill_price.

    A fill price of 0 asks for throughput alone and gives small groups; a higher one large groups.
    """

    def worth(cut: Cut) -> float:
        return sum(max(0.0, 1 / (times[size] * rate) - fill_price) for size, rate in cut)

    return tuple(
        ((max(found, key=lambda cut: (worth(cut), -len(cut))), number),)
        for found, number in node_cuts
    )


def dealt(
    costs: SearchCosts,
    cut_counts: tuple[tuple[tuple[Cut, int], ...], ...],
    num_pipelines: int,
) -> State | None:
    """Deal groups, fastest first, each to the pipeline with least throughput.

    Groups so slow that one layer would take longer than the step allows stay spare. None if there
    are fewer groups than pipelines.
    """
    times = dict(costs.time_by_degree)
    supply = supply_of(cut_counts)

    def y_s(group: Group) -> float:
        return times[group[0]] * group[1]

    ranked = sorted(supply.elements(), key=lambda group: (y_s(group), group))
    if len(ranked) < num_pipelines:
        return None
    throughput = sum(1 / y_s(group) for group in ranked)
    longest_s = max(costs.num_layers * num_pipelines / throughput, y_s(ranked[num_pipelines - 1]))
    queue = [(0.0, index) for index in range(num_pipelines)]
    dealt_groups: list[list[Group]] = [[] for _ in queue]
    spare: Counter[Group] = Counter()
    for group in ranked:
        load, index = queue[0]
        if y_s(group) > longest_s or len(dealt_groups[index]) >= costs.num_layers:
            spare[group] += 1
            continue
        dealt_groups[index].append(group)
        heapq.heapreplace(queue, (load + 1 / y_s(group), index))
    return State(
        cut_counts=cut_counts,
        patterns=tuple(tuple(sorted(groups)) for groups in dealt_groups),
        spare=tuple(sorted(spare.elements())),
    )
