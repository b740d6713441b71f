"""Choose pipelines out of many known ones, and the cuts that give their groups: an integer program.

Local search moves one group at a time and so keeps pipelines alike. The best plans often are not:
a few pipelines of healthy groups and one of all that is left. Those pipelines are what the bound's
knapsacks find, each cheapest under the prices for some limit; here they are put together.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from malleus_megatron.planner.grouping import Cut
from malleus_megatron.planner.pipelines import Pattern
from malleus_megatron.planner.starts import NodeCuts
from malleus_megatron.planner.state import CutCounts, State, supply_of

WORK = 0.1
"""Deterministic time of the solver, about seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to choose from, and how much is needed."""

    capacities: Mapping[Pattern, int]
    """Micro-batches that a pipeline with these groups does within the limit."""
    node_cuts: NodeCuts
    num_pipelines: int | None
    num_microbatches: int


def choose(choice: Choice) -> State | None:
    """Pipelines that do all micro-batches, or None if none are found."""
    from ortools.linear_solver import pywraplp  # noqa: PLC0415 (slow to import)

    solver = pywraplp.Solver.CreateSolver("SAT")
    solver.SetSolverSpecificParametersAsString(
        f"num_workers:1 random_seed:0 max_deterministic_time:{WORK}"
    )
    most = choice.num_pipelines or choice.num_microbatches
    taken = {
        pattern: solver.IntVar(0, most, f"take{i}") for i, pattern in enumerate(choice.capacities)
    }
    cut = [
        {option: solver.IntVar(0, number, f"cut{i}_{j}") for j, option in enumerate(found)}
        for i, (found, number) in enumerate(choice.node_cuts)
    ]
    for options, (_, number) in zip(cut, choice.node_cuts, strict=True):
        solver.Add(solver.Sum(list(options.values())) == number)
    if choice.num_pipelines is not None:
        solver.Add(solver.Sum(list(taken.values())) == choice.num_pipelines)
    uses = {pattern: Counter(pattern) for pattern in taken}
    for group in sorted({group for pattern in taken for group in pattern}):
        given = [
            variable * option.count(group)
            for options in cut
            for option, variable in options.items()
            if group in option
        ]
        used = [variable * uses[p][group] for p, variable in taken.items() if group in uses[p]]
        solver.Add(solver.Sum(used) <= solver.Sum(given))
    total = solver.Sum([choice.capacities[p] * variable for p, variable in taken.items()])
    solver.Add(total >= choice.num_microbatches)
    if solver.Solve() not in {pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE}:
        return None
    patterns = [pattern for pattern, variable in taken.items() for _ in range(_whole(variable))]
    counts = [[(option, _whole(v)) for option, v in options.items()] for options in cut]
    return _state(patterns, counts)


def _whole(variable: Any) -> int:
    value: float = variable.solution_value()
    return round(value)


def _state(patterns: Iterable[Pattern], counts: Iterable[Iterable[tuple[Cut, int]]]) -> State:
    cut_counts: CutCounts = tuple(
        tuple(sorted((option, number) for option, number in options if number))
        for options in counts
    )
    chosen = tuple(sorted(patterns))
    spare = supply_of(cut_counts)
    for pattern in chosen:
        spare.subtract(pattern)
    return State(cut_counts=cut_counts, patterns=chosen, spare=tuple(sorted(spare.elements())))
