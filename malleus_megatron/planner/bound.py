"""A proof that no plan is better than some value: prices for groups, by linear programming.

Suppose a plan with value <= z exists. Give every kind of group a price >= 0. Pipeline i, with m_i
micro-batches, has groups worth at least C(m_i) (`mixes`). All groups come from nodes, and no cut of
node v is worth more than V_v. So sum_i C(m_i) <= sum_v V_v. If the least sum of C over all splits
of the micro-batches is more than that, no plan has a value <= z.

The best prices are the dual of a linear program over relaxed pipelines and cuts, whose columns are
made when needed. The proof does not rest on the solver or on these columns: the inequality is
checked with the prices at hand, over every b, every m and every cut. Prices must not rise with a
group's rate; then V_v is a sum over consecutive blocks of the node's GPUs (`grouping`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from malleus_megatron.cost.bounds import node_throughput
from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.grouping import Group, NodeClass
from malleus_megatron.planner.mixes import Mix, Mixer
from malleus_megatron.planner.prices import PriceProgram
from malleus_megatron.planner.starts import NodeCuts

STEPS = 5
"""Halvings of the gap."""
ROUNDS = 12
"""Rounds of new columns for one z."""
FEW_PIPELINES = 4
FEW_MICROBATCHES = 130
"""Up to so many of both, splits of micro-batches are looked at one by one."""
COLUMNS = 64
FAR = 3
"""New columns a round."""
COMMON_SHARE = 1 / 8
"""A rate that this share of all GPUs has is looked at in full."""
SAFETY = 1e-7
"""The inequality must be broken by this share, so that rounding proves nothing."""


class BoundSearch:
    """Largest z that can be proved out of reach, between two values."""

    def __init__(
        self, costs: SearchCosts, classes: Sequence[NodeClass], node_cuts: NodeCuts
    ) -> None:
        self.costs = costs
        self.classes = classes
        self.sizes = costs.problem.tensor_parallel_sizes
        self.num_pipelines = costs.problem.num_pipelines
        groups = _all_groups(classes, self.sizes)
        common = common_rates(classes)
        times = dict(costs.time_by_degree)
        self.mixer = Mixer(
            costs,
            groups,
            common=common,
            throughput=sum(
                len(c.nodes) * node_throughput(c.rates, self.sizes, times) for c in classes
            ),
        )
        self.program = PriceProgram(costs, node_cuts, groups, common)
        self.prices = self.program.start()

    def bisect(self, low_s: float, high_s: float, *, whole: bool) -> float:
        """The largest z found out of reach between a proved value and a plan's, roughly."""
        for _ in range(STEPS):
            middle_s = (low_s + high_s) / 2
            if self.excludes(middle_s, whole=whole):
                low_s = middle_s
            else:
                high_s = middle_s
        return low_s

    def excludes(self, limit_s: float, *, whole: bool) -> bool:
        """True if prices are found that no plan with value <= limit can satisfy."""
        if limit_s < self.costs.num_layers * self.mixer.fastest_s * self.costs.fill:
            return True
        self.program.clear()
        for number in range(ROUNDS):
            prices = self.prices
            mixes = self.mixer.curve(prices.by_group, limit_s, prices.earned if whole else None)
            if not mixes or self._contradiction(mixes):
                return True
            if number > 0 and prices.objective <= SAFETY:
                return False
            if not self.program.add(self._most_violated(mixes)):
                return False
            self.prices = self.program.solve()
        return False

    def _most_violated(self, mixes: Sequence[Mix]) -> list[Mix]:
        """Pipelines that cost less than they earn, the worst first, one for each m.

        Those with about M / D micro-batches come first: they are what a plan is made of.
        """
        prices = self.prices
        usual = self.costs.num_microbatches / (self.num_pipelines or 1)

        def rank(mix: Mix) -> tuple[bool, float, int]:
            num = mix.num_microbatches
            far = self.num_pipelines is not None and not usual / FAR <= num <= usual * FAR
            return (far, mix.price - prices.earned(num), num)

        ranked = sorted(((rank(mix), mix) for mix in mixes), key=lambda pair: pair[0])
        return [mix for (_, loss, _), mix in ranked if loss < 0][:COLUMNS]

    def _contradiction(self, mixes: Sequence[Mix]) -> bool:
        """Check that pipelines that do all micro-batches cost more than the nodes are worth."""
        worth = sum(
            len(c.nodes) * node_worth(c.rates, self.sizes, self.prices.by_group)
            for c in self.classes
        )
        points = [(mix.num_microbatches, mix.price) for mix in mixes]
        need = least_price(points, self.costs.num_microbatches, self.num_pipelines)
        return need > worth * (1 + SAFETY)


def node_worth(rates: Sequence[float], sizes: Sequence[int], price: Mapping[Group, float]) -> float:
    """What the groups of a node are worth at most, over all its cuts."""
    best = [0.0] * (len(rates) + 1)
    for end, rate in enumerate(rates, start=1):
        best[end] = best[end - 1]
        for size in sizes:
            if size <= end:
                best[end] = max(best[end], best[end - size] + price[size, rate])
    return best[-1]


def common_rates(classes: Sequence[NodeClass]) -> frozenset[float]:
    """Rates that many GPUs have: they decide where a stage's limit on layers steps."""
    number = Counter(rate for c in classes for rate in c.rates for _ in c.nodes)
    ranked = sorted(number, key=lambda rate: (-number[rate], rate))
    least = number.total() * COMMON_SHARE
    return frozenset(rate for i, rate in enumerate(ranked) if i == 0 or number[rate] >= least)


def _all_groups(classes: Sequence[NodeClass], sizes: Sequence[int]) -> list[Group]:
    """Every kind of group that blocks of a node's GPUs, fastest first, can be."""
    return sorted(
        {
            (size, rate)
            for c in classes
            for end, rate in enumerate(c.rates, start=1)
            for size in sizes
            if size <= end
        }
    )


def least_price(
    points: Sequence[tuple[int, float]], num_microbatches: int, num_pipelines: int | None
) -> float:
    """The least price of pipelines that do all micro-batches; a lower bound of it for many.

    Args:
        points: Pairs (m, least price of a pipeline with m micro-batches).
        num_microbatches: Of all pipelines.
        num_pipelines: None: any number; then the cheapest price per micro-batch decides.
    """
    if num_pipelines is None:
        return num_microbatches * min(price / num for num, price in points)
    if num_pipelines <= FEW_PIPELINES and num_microbatches <= FEW_MICROBATCHES:
        return _exact_split(dict(points), num_microbatches, num_pipelines)
    return num_pipelines * hull_at(points, num_microbatches / num_pipelines)


def _exact_split(price: dict[int, float], total: int, num_pipelines: int) -> float:
    """Least sum of prices over all splits of the micro-batches."""
    one = [price.get(num, float("inf")) for num in range(total + 1)]
    sums = one
    for _ in range(num_pipelines - 1):
        sums = [
            min((sums[num - own] + one[own] for own in range(1, num)), default=float("inf"))
            for num in range(total + 1)
        ]
    return sums[total]


def hull_at(points: Sequence[tuple[int, float]], x: float) -> float:
    """The lower convex hull of points, non-decreasing, at x; inf beyond the last point."""
    hull: list[tuple[float, float]] = []
    for point in points:
        while hull and hull[-1][1] >= point[1]:
            hull.pop()
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (point[0] - hull[-2][0]) >= (
            point[1] - hull[-2][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append(point)
    if x > hull[-1][0]:
        return float("inf")
    before = hull[0]
    for after in hull[1:]:
        if after[0] >= x:
            break
        before = after
    else:
        return hull[0][1]
    if x <= before[0]:
        return before[1]
    share = (x - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])
