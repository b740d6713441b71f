"""The least that one pipeline's groups can cost under prices: a bound that no layout undercuts.

Given a price for each kind of group and a limit z on the value, a pipeline with m micro-batches
whose slowest stage takes b needs groups j with

    sum_j l_j = L                       all layers,
    l_j <= w_k = floor(b / y_k)         below b (and what memory leaves),
    sum_j l_j y_j <= F = z - (m-1) b    the fill (step time only; embedding and head taken off).

For any nu >= 0 the prices are at least T(b, nu) - nu F, where T is the least of
sum_j (price_j + nu l_j y_j) under the first two lines. T is found in two ways, both lower bounds:

* in fractions of groups: a line under the points (y_k, price_k / w_k), of slope -nu;
* in whole groups: a knapsack over layers (`knapsack`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from malleus_megatron.planner.costs import ROUNDING, SearchCosts
from malleus_megatron.planner.grouping import Group
from malleus_megatron.planner.knapsack import Counts, Item, cheapest_cover, cheapest_line
from malleus_megatron.planner.pipelines import Pattern

EACH = 1024
"""Up to so many micro-batches every number of them is looked at; beyond, where costs turn."""

type Earned = Callable[[int], float]
"""What a pipeline may cost by its number of micro-batches: a straight line."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Groups of one pipeline, whole or in fractions, and the micro-batches they do."""

    num_microbatches: int
    price: float
    counts: Counts


class Trade:
    """Price against fill for one b: lines that bound it from below, and groups that come near."""

    def __init__(self, items: Sequence[Item], num_layers: int) -> None:
        """In fractions of groups: the lower left convex hull of (y, price per layer)."""
        self.items = items
        self.num_layers = num_layers
        self.whole: set[float] = set()
        self.whole_points: list[tuple[float, Counts]] = []
        hull: list[Item] = []
        for item in items:
            if hull and item.per_layer >= hull[-1].per_layer:
                continue
            while len(hull) > 1 and _above(hull[-2], hull[-1], item):
                hull.pop()
            hull.append(item)
        self.lines = [(num_layers * hull[-1].per_layer, 0.0)]
        for left, right in pairwise(hull):
            slope = (left.per_layer - right.per_layer) / (right.y_s - left.y_s)
            self.lines.append((num_layers * (left.per_layer + slope * left.y_s), slope))
        self.points: list[tuple[float, Counts]] = [
            (num_layers * item.y_s, ((item.group, num_layers / item.layers),)) for item in hull
        ]

    def price(self, fill_s: float) -> tuple[float, float]:
        """No groups with this fill or less cost less; and the slope of the line that says so."""
        return max([(base - slope * fill_s, slope) for base, slope in self.lines])

    def refine(self, slope: float) -> Counts | None:
        """Look at whole groups on a line; None if that was done before."""
        if slope in self.whole:
            return None
        self.whole.add(slope)
        line = cheapest_line(self.items, self.num_layers, slope)
        self.lines.append((line.base, slope))
        self.whole_points = sorted([*self.whole_points, (line.fill_s, line.counts)])
        return line.counts

    def counts(self, fill_s: float) -> Counts:
        """Groups for the fill: two points mixed."""
        below = [point for point in self.whole_points if point[0] <= fill_s]
        above = [point for point in self.whole_points if point[0] > fill_s]
        if not below:
            below = [point for point in self.points if point[0] <= fill_s] or self.points[:1]
        if not self.whole:
            above = [point for point in self.points if point[0] > fill_s]
        if not above or below[-1][0] >= fill_s:
            return below[-1][1]
        (low_s, low), (high_s, high) = below[-1], above[0]
        share = (fill_s - low_s) / (high_s - low_s)
        mixed: dict[Group, float] = {}
        for weight, counts in ((1 - share, low), (share, high)):
            for group, count in counts:
                mixed[group] = mixed.get(group, 0.0) + weight * count
        return tuple(sorted(mixed.items()))


class Mixer:
    """Least prices of pipelines by number of micro-batches.

    Args:
        costs: The problem's numbers.
        groups: Every kind of group.
        common: Rates that many GPUs have. Only at their kinds' limits does b step; a rare kind may
            hold what it could at the next step's b, which is more than it can.
        throughput: Layers per second of the whole cluster: no pipeline has more.
    """

    def __init__(
        self,
        costs: SearchCosts,
        groups: Sequence[Group],
        *,
        common: frozenset[float],
        throughput: float,
    ) -> None:
        times = dict(costs.time_by_degree)
        self.costs = costs
        self.common = common
        self.y_by_group = {group: times[group[0]] * group[1] for group in groups}
        self.most_layers = {
            group: costs.max_layers(group[0], 1, first=False, last=False) for group in groups
        }
        usable = (group for group in groups if self.most_layers[group] > 0)
        self.groups = sorted(usable, key=lambda group: (self.y_by_group[group], group))
        self.fastest_s = self.y_by_group[self.groups[0]] if self.groups else float("inf")
        self.ends_s = (costs.first_extra + costs.last_extra) * self.fastest_s
        self.least_slowest_s = costs.num_layers / throughput * (1 - ROUNDING)
        self.met: dict[Pattern, None] = {}
        """Whole pipelines that were cheapest for some prices and limit."""
        self._room: dict[int, list[int]] = {}
        self._steps = self._all_steps() if costs.fill else []

    def curve(
        self, prices: Mapping[Group, float], limit_s: float, earned: Earned | None
    ) -> list[Mix]:
        """For every m that a pipeline can do: a mix that none with m micro-batches undercuts.

        Of many, only those between which a straight line undercuts all others: a line that is
        below these mixes is below all, so nothing of a proof is lost.

        Args:
            prices: Of groups.
            limit_s: On the value.
            earned: Where fractions of groups cost less than this, whole groups are looked at.
                None: fractions everywhere.
        """
        if self.costs.fill:
            return self._fill_curve(prices, limit_s, earned)
        return self._steady_curve(prices, limit_s, earned)

    def _steady_curve(
        self, prices: Mapping[Group, float], limit_s: float, earned: Earned | None
    ) -> list[Mix]:
        """Without fill only b = z / m matters."""
        found: list[Mix] = []
        num_layers = self.costs.num_layers
        for num, last in self._spans(limit_s):
            holding = self._holding(limit_s / num, limit_s / num)
            items = _worthwhile(holding, prices, by_place=self.costs.limits_memory)
            if not items or limit_s / num < self.least_slowest_s:
                break
            best = min(items, key=lambda item: item.per_layer)
            count = num_layers / best.layers
            mix = Mix(last, count * best.price, ((best.group, count),))
            if earned is not None and mix.price < earned(last):
                mix = Mix(last, *cheapest_cover(items, num_layers, self._rooms(items, num)))
                self._meet(mix.counts)
            if mix.price == float("inf"):
                break
            found.append(mix)
        return found

    def _spans(self, limit_s: float) -> Iterator[tuple[int, int]]:
        """Numbers of micro-batches, first and last, between which no kind's layers change.

        The least price never falls with m. So the first one's holds for all, and the last one is
        where it means most.
        """
        most = self.costs.num_microbatches
        if most <= EACH:
            lasts = set(range(1, most + 1))
        else:
            # With fewer micro-batches than stages the room of a stage depends on them, too.
            lasts = {*range(1, self.costs.num_layers), int(limit_s / self.least_slowest_s), most}
            for group, y_s in self.y_by_group.items():
                for layers in range(1, self.most_layers[group] + 1):
                    lasts.add(int(limit_s / (layers * y_s) * (1 + ROUNDING)))
        first = 1
        for last in sorted(last for last in lasts if 1 <= last <= most):
            yield first, last
            first = last + 1

    def _rooms(self, items: Sequence[Item], num_microbatches: int) -> list[list[int]]:
        """Most layers of each kind by place, counted from 1 at the last stage."""
        if not self.costs.limits_memory:
            return [[item.layers] for item in items]
        rooms = []
        for item in items:
            by_inflight = self._room_by_inflight(item.group[0])
            rooms.append([min(item.layers, room) for room in by_inflight[:num_microbatches]])
        return rooms

    def _room_by_inflight(self, size: int) -> list[int]:
        known = self._room.get(size)
        if known is None:
            numbers = range(1, self.costs.num_layers + 1)
            known = [self.costs.max_layers(size, n, first=False, last=False) for n in numbers]
            self._room[size] = known
        return known

    def _fill_curve(
        self, prices: Mapping[Group, float], limit_s: float, earned: Earned | None
    ) -> list[Mix]:
        """For each m the least over all b. Between two b's the room is taken at the lower."""
        costs = self.costs
        room_s = limit_s - self.ends_s
        least: dict[int, tuple[float, Trade, float]] = {}
        least_s = costs.num_layers * self.fastest_s * (1 - ROUNDING)
        for slowest_s, holding in self._steps:
            if slowest_s > limit_s * (1 + ROUNDING):
                break
            trade = Trade(_worthwhile(holding, prices, by_place=False), costs.num_layers)

            def slope_at(num: int, slowest_s: float = slowest_s, trade: Trade = trade) -> float:
                fill_s = room_s - (num - 1) * slowest_s
                price, slope = trade.price(fill_s)
                while earned is not None and price < earned(num):
                    counts = trade.refine(slope)
                    if counts is None:
                        break
                    self._meet(counts)
                    price, slope = trade.price(fill_s)
                if num not in least or price < least[num][0]:
                    least[num] = price, trade, fill_s
                return slope

            most = min(costs.num_microbatches, 1 + int((room_s - least_s) / slowest_s))
            visit_turns(slope_at, most)
        return [
            Mix(num, price, trade.counts(fill_s))
            for num, (price, trade, fill_s) in sorted(least.items())
        ]

    def _meet(self, counts: Counts) -> None:
        self.met[tuple(group for group, count in counts for _ in range(round(count)))] = None

    def _all_steps(self) -> list[tuple[float, list[tuple[Group, float, int]]]]:
        """Every b at which a common kind may hold one layer more, and what the kinds hold there."""
        found = {
            layers * self.y_by_group[group]
            for group in self.groups
            if group[1] in self.common
            for layers in range(1, self.costs.num_layers + 1)
        }
        found |= {self.least_slowest_s}
        limits = [limit for limit in sorted(found) if limit >= self.least_slowest_s]
        uppers = [*limits[1:], float("inf")]
        steps = []
        for limit, upper in zip(limits, uppers, strict=True):
            holding = self._holding(limit, upper)
            if holding:
                steps.append((limit, holding))
        return steps

    def _holding(self, slowest_s: float, upper_s: float) -> list[tuple[Group, float, int]]:
        """Kinds that hold a layer or more below b, fastest first, and how many."""
        holding = []
        for group in self.groups:
            y_s = self.y_by_group[group]
            limit_s = slowest_s if group[1] in self.common else upper_s
            most = self.most_layers[group]
            layers = most if limit_s >= most * y_s else int(limit_s / y_s * (1 + ROUNDING))
            if layers > 0:
                holding.append((group, y_s, layers))
        return holding


def _worthwhile(
    holding: Sequence[tuple[Group, float, int]], prices: Mapping[Group, float], *, by_place: bool
) -> list[Item]:
    """Kinds that no faster kind beats in price and layers.

    Where each place has its own room (`by_place`), only a kind of no smaller size can: it has room
    wherever the other has.
    """
    items: list[Item] = []
    for group, y_s, layers in holding:
        price = prices[group]
        for item in items:
            wide = not by_place or item.group[0] >= group[0]
            if wide and item.price <= price and item.layers >= layers:
                break
        else:
            items.append(Item(group, y_s, layers, price, price / layers))
    return items


def _above(left: Item, middle: Item, right: Item) -> bool:
    """True if the middle point is not below the line from left to right."""
    run = (middle.y_s - left.y_s) * (right.per_layer - left.per_layer)
    return (middle.per_layer - left.per_layer) * (right.y_s - left.y_s) >= run


def visit_turns(slope_at: Callable[[int], float], most: int) -> None:
    """Visit 1, `most` and all between where a convex function turns; each of them if few.

    Where two slopes are equal the function is straight between them.
    """
    if most <= EACH:
        for num in range(1, most + 1):
            slope_at(num)
        return
    open_spans = [(1, slope_at(1), most, slope_at(most))]
    while open_spans:
        low, low_slope, high, high_slope = open_spans.pop()
        if high - low > 1 and low_slope != high_slope:
            middle = (low + high) // 2
            slope = slope_at(middle)
            open_spans += [(low, low_slope, middle, slope), (middle, slope, high, high_slope)]
