"""Whole groups that hold all layers at the least price."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from malleus_megatron.planner.grouping import Group

type Counts = tuple[tuple[Group, float], ...]
"""Groups and how many of each."""


@dataclass(frozen=True, slots=True)
class Item:
    """A kind of group below some limit b: layer time, most layers, price."""

    group: Group
    y_s: float
    layers: int
    price: float
    per_layer: float
    """Price of a layer if the group is full."""


@dataclass(frozen=True, slots=True)
class Line:
    """Least of sum price_j + slope * l_j * y_j, and the groups that have it."""

    base: float
    fill_s: float
    counts: Counts


def cheapest_line(items: Sequence[Item], num_layers: int, slope: float) -> Line:
    """Least sum of price_j + slope * l_j * y_j over whole groups with exactly `num_layers` layers.

    Linear in the layers once the groups are chosen, so all groups but one are full.
    """
    full = [0.0]
    last = [-1]
    costs = [(i, k.layers, k.price + slope * k.layers * k.y_s) for i, k in enumerate(items)]
    for total in range(1, num_layers + 1):
        best, chosen = inf, -1
        for i, layers, cost in costs:
            if layers <= total:
                whole = cost + full[total - layers]
                if whole < best:
                    best, chosen = whole, i
        full.append(best)
        last.append(chosen)
    best, rest, partial = full[num_layers], 0, -1
    for i, item in enumerate(items):
        for part in range(1, min(item.layers, num_layers + 1)):
            cost = full[num_layers - part] + item.price + slope * part * item.y_s
            if cost < best:
                best, rest, partial = cost, part, i
    counts: dict[Group, float] = {}
    fill_s = 0.0
    if partial >= 0:
        counts[items[partial].group] = 1.0
        fill_s = rest * items[partial].y_s
    left = num_layers - rest
    while left > 0:
        item = items[last[left]]
        counts[item.group] = counts.get(item.group, 0.0) + 1
        fill_s += item.layers * item.y_s
        left -= item.layers
    return Line(best, fill_s, tuple(sorted(counts.items())))


def cheapest_cover(
    items: Sequence[Item], num_layers: int, rooms: Sequence[Sequence[int]]
) -> tuple[float, Counts]:
    """Least sum of prices over whole groups that may hold `num_layers` layers or more.

    Args:
        items: Kinds.
        num_layers: Layers of the model.
        rooms: For each kind, most layers by place, counted from 1 at the last stage; beyond the
            list as at its end. Each place has one group.
    """
    least = [0.0] + [inf] * num_layers
    picks: list[list[int]] = []
    for place in range(num_layers):
        offers = [
            (i, room[min(place, len(room) - 1)], item.price)
            for i, (item, room) in enumerate(zip(items, rooms, strict=True))
        ]
        grown, pick = _one_more(least, [offer for offer in offers if offer[1] > 0])
        if grown == least:
            break
        least = grown
        picks.append(pick)
    counts: dict[Group, float] = {}
    left = num_layers if least[num_layers] < inf else 0
    for place in range(len(picks) - 1, -1, -1):
        i = picks[place][left]
        if i >= 0:
            room = rooms[i]
            counts[items[i].group] = counts.get(items[i].group, 0.0) + 1
            left = max(0, left - room[min(place, len(room) - 1)])
    return least[num_layers], tuple(sorted(counts.items()))


def _one_more(
    least: list[float], offers: Sequence[tuple[int, int, float]]
) -> tuple[list[float], list[int]]:
    """The least prices if one more place may be filled, and with what (-1: it is not)."""
    grown = list(least)
    pick = [-1] * len(least)
    for i, layers, price in offers:
        before = [0.0] * layers + least
        for total, cost in enumerate(before[: len(least)]):
            if cost + price < grown[total]:
                grown[total], pick[total] = cost + price, i
    return grown, pick
