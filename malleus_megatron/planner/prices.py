"""Prices of groups by linear programming (GLOP): the only file that needs a solver."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.grouping import Group
from malleus_megatron.planner.mixes import Mix
from malleus_megatron.planner.starts import NodeCuts

FREE_PRICES = 14
"""Up to so many kinds of groups have each its own price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a group is worth, a micro-batch earns, and a pipeline earns beside."""

    by_group: Mapping[Group, float]
    per_microbatch: float
    per_pipeline: float
    objective: float
    """kappa M + mu D - sum_v V_v as the program sees it; all nodes together are worth 1."""

    def earned(self, num_microbatches: int) -> float:
        """By a pipeline with so many micro-batches."""
        return self.per_microbatch * num_microbatches + self.per_pipeline


class PriceProgram:
    """Maximise kappa M + mu D, all nodes worth 1, no known pipeline earning more than it costs."""

    def __init__(
        self,
        costs: SearchCosts,
        node_cuts: NodeCuts,
        groups: Sequence[Group],
        common: frozenset[float],
    ) -> None:
        self.common = common
        self.costs = costs
        self.node_cuts = node_cuts
        self.groups = groups
        self.num_pipelines = costs.problem.num_pipelines
        self.columns: dict[tuple[int, tuple[tuple[Group, float], ...]], Mix] = {}

    def start(self) -> Prices:
        """Throughput prices: a group is worth the layers per second it can do."""
        times = dict(self.costs.time_by_degree)
        worth = {group: 1 / (times[group[0]] * group[1]) for group in self.groups}
        return Prices(by_group=worth, per_microbatch=0.0, per_pipeline=1e30, objective=1.0)

    def clear(self) -> None:
        """Forget the pipelines: they belong to another limit."""
        self.columns.clear()

    def add(self, mixes: Sequence[Mix]) -> bool:
        """Add pipelines; False if all were known."""
        before = len(self.columns)
        for mix in mixes:
            self.columns[mix.num_microbatches, mix.counts] = mix
        return len(self.columns) > before

    def solve(self) -> Prices:
        """The best prices against the pipelines known so far."""
        from ortools.linear_solver import pywraplp  # noqa: PLC0415 (slow to import)

        solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = solver.infinity()
        price = self._variables(solver)
        kappa = solver.NumVar(0, infinity, "kappa")
        free = self.num_pipelines is None
        mu = solver.NumVar(0 if free else -infinity, 0 if free else infinity, "mu")
        worth = [solver.NumVar(0, infinity, f"worth{i}") for i in range(len(self.node_cuts))]
        solver.Add(sum(n * v for (_, n), v in zip(self.node_cuts, worth, strict=True)) == 1)
        for (found, _), node_worth in zip(self.node_cuts, worth, strict=True):
            for cut in found:
                solver.Add(sum(price[group] for group in cut) <= node_worth)
        for faster, slower in self._neighbours():
            solver.Add(price[slower] <= price[faster])
        for mix in self.columns.values():
            cost = sum(count * price[group] for group, count in mix.counts)
            solver.Add(kappa * mix.num_microbatches + mu <= cost)
        number = 0 if free else self.num_pipelines
        solver.Add(kappa * self.costs.num_microbatches + mu * number <= 1e3)
        solver.Maximize(kappa * self.costs.num_microbatches + mu * number)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return self.start()
        return Prices(
            by_group=self._monotone({g: float(price[g].solution_value()) for g in price}),
            per_microbatch=kappa.solution_value(),
            per_pipeline=mu.solution_value(),
            objective=solver.Objective().Value() - 1,
        )

    def _variables(self, solver: Any) -> dict[Group, Any]:
        """A price for each kind; those of rare rates, if many, all follow alpha / y - beta.

        A rare kind's own price would be 0 until some pipeline with it was met, one after the other.
        """
        times = dict(self.costs.time_by_degree)
        alpha = solver.NumVar(0, solver.infinity(), "alpha")
        beta = solver.NumVar(0, solver.infinity(), "beta")
        few = len(self.groups) <= FREE_PRICES
        return {
            group: solver.NumVar(0, solver.infinity(), f"price{group}")
            if few or group[1] in self.common
            else alpha * (1 / (times[group[0]] * group[1])) - beta
            for group in self.groups
        }

    def _neighbours(self) -> list[tuple[Group, Group]]:
        """Groups of one size, each with the next slower one."""
        by_size: dict[int, list[Group]] = defaultdict(list)
        for group in self.groups:
            by_size[group[0]].append(group)
        return [pair for same in by_size.values() for pair in pairwise(same)]

    def _monotone(self, prices: dict[Group, float]) -> dict[Group, float]:
        """Take the solver's rounding off: no price below 0 or below a slower group's."""
        fixed = {group: max(0.0, value) for group, value in prices.items()}
        for faster, slower in reversed(self._neighbours()):
            fixed[faster] = max(fixed[faster], fixed[slower])
        return fixed
