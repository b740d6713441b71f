"""A proof that no plan is better than some value: prices for groups, found by linear programming.

Suppose a plan with value <= z exists. Give every kind of group a price >= 0. Each pipeline i, with m_i
micro-batches, has groups worth at least C(m_i) (`mixes`). All its groups come from nodes, and no cut
of node v is worth more than V_v. So sum_i C(m_i) <= sum_v V_v. With any reward kappa per micro-batch,
C(m) >= kappa m + mu for mu = min over m of C(m) - kappa m, hence, D pipelines doing M micro-batches,

    kappa M + mu D <= sum_v V_v .

Prices that break this prove that no plan reaches z. The best prices are the dual of a linear program
over (relaxed) pipelines and cuts; its columns are made when needed. The proof does not rest on the
solver: the inequality is checked with the prices at hand, against every b and m.

Prices must not rise with a group's rate, since only undominated cuts of a node are looked at; with
such prices a dominated cut is never worth more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.grouping import Group
from malleus_megatron.planner.mixes import Mix, Mixer
from malleus_megatron.planner.prices import PriceProgram, Prices
from malleus_megatron.planner.starts import NodeCuts

STEPS = 6
"""Halvings of the gap."""
ROUNDS = 12
"""Rounds of new columns for one z."""
FEW_PIPELINES = 8
FEW_MICROBATCHES = 300
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

    def __init__(self, costs: SearchCosts, node_cuts: NodeCuts, num_pipelines: int | None) -> None:
        self.costs = costs
        self.node_cuts = node_cuts
        self.num_pipelines = num_pipelines
        groups = sorted({group for found, _ in node_cuts for cut in found for group in cut})
        common = common_rates(node_cuts)
        self.mixer = Mixer(
            costs,
            groups,
            common=common,
            throughput=throughput(node_cuts, dict(costs.time_by_degree)),
        )
        self.program = PriceProgram(costs, node_cuts, groups, num_pipelines, common)
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
            numbers = range(1, self.costs.num_microbatches + 1)
            earned = [prices.per_microbatch * num + prices.per_pipeline for num in numbers]
            mixes = self.mixer.curve(prices.by_group, limit_s, earned if whole else None)
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
            earned = prices.per_microbatch * num + prices.per_pipeline
            return (far, mix.price - earned, num)

        ranked = sorted(((rank(mix), mix) for mix in mixes), key=lambda pair: pair[0])
        return [mix for (_, loss, _), mix in ranked if loss < 0][:COLUMNS]

    def _contradiction(self, mixes: Sequence[Mix]) -> bool:
        """Check that pipelines that do all micro-batches cost more than the nodes are worth."""
        worth = sum(
            number * max((sum(self.prices.by_group[g] for g in cut) for cut in found), default=0.0)
            for found, number in self.node_cuts
        )
        points = [(mix.num_microbatches, mix.price) for mix in mixes]
        need = least_price(points, self.costs.num_microbatches, self.num_pipelines)
        return need > worth * (1 + SAFETY)


def common_rates(node_cuts: NodeCuts) -> frozenset[float]:
    """Rates that many GPUs have: they decide where a stage's limit on layers steps."""
    number: dict[float, int] = {}
    for found, nodes in node_cuts:
        for size, rate in max(found, key=len, default=()):
            number[rate] = number.get(rate, 0) + size * nodes
    ranked = sorted(number, key=lambda rate: (-number[rate], rate))
    least = sum(number.values()) * COMMON_SHARE
    return frozenset(rate for i, rate in enumerate(ranked) if i == 0 or number[rate] >= least)


def throughput(node_cuts: NodeCuts, times: Mapping[int, float]) -> float:
    """Layers per second that the cluster can do at most: each node cut for the most of it."""
    return sum(
        number * max((sum(1 / (times[s] * rate) for s, rate in cut) for cut in found), default=0.0)
        for found, number in node_cuts
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
