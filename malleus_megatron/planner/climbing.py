"""The search of large clusters: first plans, climbs, kicks, until the goal or the budget."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.division import Division, divided
from malleus_megatron.planner.local_search import LocalSearch
from malleus_megatron.planner.pipelines import Pattern, PipelineBook
from malleus_megatron.planner.starts import NodeCuts, best_cuts, dealt
from malleus_megatron.planner.state import State

FILL_PRICES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6)
"""In throughputs of a healthy group of the largest size."""
MOST_CLIMBS = 5
PATIENCE = 40
"""Kicks without success before the search gives up."""
EXCESS = 4.0
"""A first plan that does not fit is looked at as if the limit were this times the fluid value."""

type Progress = Callable[[float, float], None]
"""Told the best value so far and the proved bound, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the search may spend, in moves; and when it is good enough."""

    climb: int
    kicks: int
    goal_s: float
    seed: int


class Climber:
    """Searches of one problem that share what they know about pipelines."""

    def __init__(
        self, costs: SearchCosts, node_cuts: NodeCuts, fluid_s: float, effort: Effort
    ) -> None:
        self.costs = costs
        self.node_cuts = node_cuts
        self.fluid_s = fluid_s
        self.effort = effort
        self.work = 0
        self.best: Division | None = None
        self.best_state: State | None = None
        self._books: dict[int, PipelineBook] = {}
        self._number = 1

    def resume(self, state: State) -> None:
        """Climb from a plan that was found elsewhere."""
        search = self._search(len(state.patterns))
        search.climb(state)
        self._keep(search)

    @property
    def patterns(self) -> list[Pattern]:
        """Every pipeline met so far."""
        return [pattern for book in self._books.values() for pattern in book.known()]

    def capacity(self, pattern: Pattern, limit_s: float) -> int:
        """Micro-batches that a pipeline does within a limit."""
        return self._book(self._number).capacity(pattern, limit_s)

    def run(self, numbers: list[int], progress: Progress | None = None) -> Division | None:
        """The best division found with one of these numbers of pipelines."""
        random = Random(self.effort.seed)
        starts = self._starts(numbers)
        if not starts:
            return None
        climbs: list[tuple[float, int, LocalSearch]] = []
        for number, state in starts[:MOST_CLIMBS]:
            search = self._search(number)
            search.climb(state)
            self._keep(search)
            if search.best is not None and search.best_state is not None:
                climbs.append((search.best.value_s, len(climbs), search))
            if self._reached():
                return self.best
            if progress is not None and self.best is not None:
                progress(self.best.value_s, 0.0)
        if not climbs:
            return self.best
        _, _, search = min(climbs)
        self._kick(search, random, progress)
        return self.best

    def _starts(self, numbers: list[int]) -> list[tuple[int, State]]:
        """First plans, best first; those that are alike once."""
        times = dict(self.costs.time_by_degree)
        unit = 1 / min(times.values())
        found: dict[State, tuple[float, int]] = {}
        for price in FILL_PRICES:
            cut_counts = best_cuts(self.node_cuts, times, price * unit)
            for number in numbers:
                state = dealt(self.costs, cut_counts, number)
                if state is not None and state not in found:
                    value_s = divided(self._book(number), state.patterns).value_s
                    found[state] = (value_s, number)
        ranked = sorted(found.items(), key=lambda item: (item[1], item[0].patterns))
        return [(number, state) for state, (_, number) in ranked]

    def _kick(self, search: LocalSearch, random: Random, progress: Progress | None) -> None:
        state = search.best_state
        search.budget = search.work + self.effort.kicks
        failures = 0
        while state is not None and failures < PATIENCE and not search.done:
            before = search.best
            state = search.climb(search.kick(state, random))
            failures += 1
            if search.best is not before:
                failures = 0
                self._keep(search)
                if progress is not None and self.best is not None:
                    progress(self.best.value_s, 0.0)
            if search.best is not before or search.total(state) < search.home - 1.0:
                state = search.best_state

    def _search(self, number: int) -> LocalSearch:
        limit_s = self.fluid_s * EXCESS
        if self.best is not None and self.best.value_s < limit_s:
            limit_s = self.best.value_s * 1.05
        return LocalSearch(
            self._book(number),
            self.node_cuts,
            limit_s=limit_s,
            budget=self.effort.climb,
            goal_s=self.effort.goal_s,
        )

    def _book(self, number: int) -> PipelineBook:
        least = max(1, self.costs.num_microbatches // number // 4)
        if least not in self._books:
            self._books[least] = PipelineBook(self.costs, complete=False, least_microbatches=least)
        return self._books[least]

    def _keep(self, search: LocalSearch) -> None:
        self.work += search.work
        if search.best is not None and (
            self.best is None or search.best.value_s < self.best.value_s
        ):
            self.best, self.best_state = search.best, search.best_state
            self._number = len(search.best.patterns)

    def _reached(self) -> bool:
        return self.best is not None and self.best.value_s <= self.effort.goal_s
