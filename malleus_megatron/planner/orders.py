"""Orders of a pipeline's stages worth trying.

Order matters through memory (an earlier stage holds more micro-batches in flight) and through
embedding and head. Otherwise stages may stand in any order.

Groups of one TP size: the slower ones stand where fewer layers fit. Say a faster group a stands
where c_s layers fit and a slower b where c_t >= c_s do. Swap them: if b's layers fit c_s, keep
layers with the groups; else swap the layers too, and then a has more of them than before and b
fewer, so the sum of times falls and no limit is passed. Embedding and head take time only where
they are, so the argument leaves out the first and the last stage if they take any: then every
kind is tried there. What is left is where each TP size stands: that is enumerated if `complete`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.grouping import Group
from malleus_megatron.planner.layers import StageSpec

type Order = tuple[Group, ...]

DEPTH_SLACKS = (1.0, 1.05)
"""The slowest stage may take this times an even share."""


def stage_specs(costs: SearchCosts, order: Order, most_inflight: int) -> list[StageSpec]:
    """The stages of an order, none with more micro-batches in flight than given."""
    times = dict(costs.time_by_degree)
    last = len(order) - 1
    return [
        StageSpec(
            times[size] * rate,
            costs.first_extra * (j == 0) + costs.last_extra * (j == last),
            costs.max_layers(size, min(last + 1 - j, most_inflight), first=j == 0, last=j == last),
        )
        for j, (size, rate) in enumerate(order)
    ]


def orders(
    costs: SearchCosts, groups: Sequence[Group], most_inflight: int, *, complete: bool
) -> Iterator[Order]:
    """Orders among which a best one is (if `complete`), else a few good ones.

    Args:
        costs: The problem's numbers.
        groups: One pipeline's.
        most_inflight: Micro-batches of the pipeline, or more.
        complete: Try every place of every TP size.
    """
    ranked = tuple(sorted(groups, key=lambda group: (-group[0], -group[1])))
    if not ranked:
        return
    if not costs.has_extras:
        if not costs.limits_memory:
            yield ranked
        elif complete:
            for sizes in _size_sequences(ranked):
                yield _by_room(costs, ranked, sizes, most_inflight)
        else:
            yield from _deep_first(costs, ranked)
        return
    if costs.limits_memory and not complete:
        yield from _few_ends(costs, ranked)
    else:
        yield from _all_ends(ranked, limits_memory=costs.limits_memory)


def _all_ends(ranked: Order, *, limits_memory: bool) -> Iterator[Order]:
    """Every kind first, every kind last; between them every sequence of sizes if it matters."""
    for first, last in _ends(ranked):
        middle = list(ranked)
        middle.remove(first)
        if len(ranked) == 1:
            yield (first,)
            continue
        middle.remove(last)
        if not limits_memory:
            yield (first, *middle, last)
            continue
        for sizes in _size_sequences(tuple(middle)):
            yield (first, *_in_turn(middle, sizes), last)


def _ends(ranked: Order) -> Iterator[tuple[Group, Group]]:
    """Every pair of kinds for the first and the last stage."""
    counts = Counter(ranked)
    if len(ranked) == 1:
        yield ranked[0], ranked[0]
        return
    for first in counts:
        for last in counts:
            if first != last or counts[first] > 1:
                yield first, last


def _deep_first(costs: SearchCosts, ranked: Order) -> Iterator[Order]:
    """Good orders without trying all: those stand in front whose layers fit there.

    Below a limit b a group of layer time y has up to b / y layers. It may stand as far in front as
    its memory holds so many with the micro-batches in flight there; who can stand furthest in
    front does. That is an earliest-deadline rule: if any order loses no layer to memory, it does.
    Where all lose some, a slow group loses least, since it has few. Larger groups first is the
    last resort: their memory is shared by most.
    """
    times = dict(costs.time_by_degree)
    y_s = {group: times[group[0]] * group[1] for group in set(ranked)}
    even_s = costs.num_layers / sum(1 / y_s[group] for group in ranked)
    slow_first = tuple(sorted(ranked, key=lambda group: (-y_s[group], group)))
    found = {slow_first: None, ranked: None}
    for slack in DEPTH_SLACKS:
        depth = {g: _depth(costs, g[0], even_s * slack / y_s[g], ranked) for g in y_s}
        found[tuple(sorted(slow_first, key=lambda group: -depth[group]))] = None
    yield from found


def _depth(costs: SearchCosts, size: int, layers: float, ranked: Order) -> int:
    """Most micro-batches in flight with which so many layers fit."""
    num_layers = max(1, int(layers))
    for inflight in range(len(ranked), 0, -1):
        if costs.max_layers(size, inflight, first=False, last=False) >= num_layers:
            return inflight
    return 0


def _few_ends(costs: SearchCosts, ranked: Order) -> Iterator[Order]:
    """The good orders, and each kind moved to the front or to the end."""
    for order in _deep_first(costs, ranked):
        yield order
        for group in sorted(set(order)):
            rest = list(order)
            rest.remove(group)
            yield (group, *rest)
            yield (*rest, group)


def _size_sequences(groups: Order) -> Iterator[tuple[int, ...]]:
    """All different sequences of the groups' TP sizes."""
    sizes = sorted((size for size, _ in groups), reverse=True)
    yield from _permutations(Counter(sizes), len(sizes))


def _permutations(left: Counter[int], length: int) -> Iterator[tuple[int, ...]]:
    if length == 0:
        yield ()
        return
    for size in [size for size, count in left.items() if count]:
        left[size] -= 1
        for rest in _permutations(left, length - 1):
            yield (size, *rest)
        left[size] += 1


def _in_turn(groups: Sequence[Group], sizes: tuple[int, ...]) -> Iterator[Group]:
    """Groups (slower first) in a sequence of sizes."""
    queues = {size: iter([g for g in groups if g[0] == size]) for size in set(sizes)}
    return (next(queues[size]) for size in sizes)


def _by_room(
    costs: SearchCosts, ranked: Order, sizes: tuple[int, ...], most_inflight: int
) -> Order:
    """Within each size, slower groups where fewer layers fit (the head takes room at the end)."""
    neutral = tuple((size, 1.0) for size in sizes)
    room = [spec.max_layers for spec in stage_specs(costs, neutral, most_inflight)]
    order = list(neutral)
    for size in set(sizes):
        places = sorted((j for j, s in enumerate(sizes) if s == size), key=lambda j: (room[j], j))
        for place, group in zip(places, (g for g in ranked if g[0] == size), strict=True):
            order[place] = group
    return tuple(order)
