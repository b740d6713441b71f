"""The best plan's value by trying everything: slow, simple, the oracle for small clusters.

It uses none of the arguments that the planner rests on: every set of TP groups of each node, every
choice of groups for every pipeline, every order of stages, every split of layers and of
micro-batches. The one thing it does not repeat is equals: two groups of the same size and rate.
"""

import math
from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations, product

from malleus_megatron.cost.pipeline import pipeline_time_s
from malleus_megatron.cost.prediction import STEP_TIME
from malleus_megatron.cost.stage import (
    ends_mib,
    extra_layers,
    layer_time_s,
    num_inflight,
    stage_memory_mib,
)
from malleus_megatron.plan.problem import Problem

type _Group = tuple[int, float]
"""TP size and rate."""
type _Groups = tuple[_Group, ...]

ROUNDING = 1e-9
"""Memory may pass its limit by this share: sums of floats."""


def exhaustive_value(problem: Problem, objective: str = STEP_TIME) -> float:
    """The least value of the objective over all valid plans; inf if there is none."""
    pipeline_values = cache(lambda groups: _pipeline_values(problem, objective, groups))
    total = problem.num_microbatches
    wanted = problem.num_pipelines
    numbers = range(1, total + 1) if wanted is None else (wanted,)

    @cache
    def best(groups: _Groups, num_pipelines: int, num_microbatches: int) -> float:
        """The least time in which so many pipelines out of these groups do so many."""
        if num_pipelines == 0:
            return 0.0 if num_microbatches == 0 else math.inf
        least = math.inf
        for chosen, rest in _choices(groups):
            for count, value in enumerate(pipeline_values(chosen), start=1):
                if value < least and count <= num_microbatches:
                    others = best(rest, num_pipelines - 1, num_microbatches - count)
                    least = min(least, max(value, others))
        return least

    return min(
        (best(groups, number, total) for groups in _all_groupings(problem) for number in numbers),
        default=math.inf,
    )


def _all_groupings(problem: Problem) -> set[_Groups]:
    """Every multiset of TP groups that the cluster can be cut into, GPUs left out or not."""
    rates = problem.counted_rates()
    nodes = []
    for gpus in problem.cluster.nodes():
        usable = tuple(sorted(rates[gpu] for gpu in gpus if not math.isinf(rates[gpu])))
        nodes.append(_groupings(usable, problem.tensor_parallel_sizes))
    return {tuple(sorted(sum(cut, ()))) for cut in product(*nodes)}


def _groupings(rates: tuple[float, ...], sizes: tuple[int, ...]) -> set[_Groups]:
    if not rates:
        return {()}
    first, rest = rates[0], rates[1:]
    found = set(_groupings(rest, sizes))
    for size in sizes:
        for others in set(combinations(range(len(rest)), size - 1)):
            group = (size, max([first, *(rest[i] for i in others)]))
            left = tuple(rate for i, rate in enumerate(rest) if i not in others)
            found |= {tuple(sorted((group, *more))) for more in _groupings(left, sizes)}
    return found


def _choices(groups: _Groups) -> Iterator[tuple[_Groups, _Groups]]:
    """Every way to take one pipeline's groups, and what is left."""
    seen = set()
    for length in range(1, len(groups) + 1):
        for indices in combinations(range(len(groups)), length):
            chosen = tuple(groups[i] for i in indices)
            if chosen not in seen:
                seen.add(chosen)
                yield chosen, tuple(g for i, g in enumerate(groups) if i not in indices)


def _pipeline_values(problem: Problem, objective: str, groups: _Groups) -> tuple[float, ...]:
    """The pipeline's least value with 1, 2, 3, ... micro-batches."""
    counts = range(1, problem.num_microbatches + 1)
    least = [math.inf] * len(counts)
    for order in set(permutations(groups)):
        for layers in _splits(problem.model.num_layers, len(order)):
            for i, count in enumerate(counts):
                value = _value(problem, objective, order, layers, count)
                if value < least[i] and _fits(problem, order, layers, count):
                    least[i] = value
    return tuple(least)


def _splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        yield tuple(ends[i + 1] - ends[i] for i in range(num_stages))


def _value(
    problem: Problem, objective: str, order: _Groups, layers: tuple[int, ...], count: int
) -> float:
    model = problem.model
    y = [layer_time_s(model, size, rate) for size, rate in order]
    if objective != STEP_TIME:
        longest = max(num * time for num, time in zip(layers, y, strict=True))
        return count * longest / model.largest_degree_time_s
    times = [
        (layers[j] + extra_layers(model, first=j == 0, last=j == len(order) - 1)) * y[j]
        for j in range(len(order))
    ]
    return pipeline_time_s(times, count)


def _fits(problem: Problem, order: _Groups, layers: tuple[int, ...], count: int) -> bool:
    memory, limit = problem.memory, problem.cluster.memory_mib
    if memory is None or limit is None:
        return True
    last = len(order) - 1
    return all(
        stage_memory_mib(
            memory,
            size,
            num_layers=layers[j],
            inflight=num_inflight(stage=j, num_stages=len(order), num_microbatches=count),
            ends_mib=ends_mib(memory, first=j == 0, last=j == last),
        )
        <= (limit - memory.reserve_mib) * (1 + ROUNDING)
        for j, (size, _) in enumerate(order)
    )
