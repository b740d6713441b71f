"""Solve a problem up to the names of the GPUs: exactly if it is small, else by search and proof."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from malleus_megatron.cost.bounds import fluid_bottleneck_s, fluid_step_time_s, node_throughput
from malleus_megatron.plan.problem import Problem
from malleus_megatron.planner.bound import BoundSearch
from malleus_megatron.planner.climbing import Climber, Effort
from malleus_megatron.planner.costs import SearchCosts
from malleus_megatron.planner.division import Division, without_idle_stragglers
from malleus_megatron.planner.gap import Closing, close_gap
from malleus_megatron.planner.grouping import NodeClass, coarse_classes, cuts, node_classes
from malleus_megatron.planner.layers import evened
from malleus_megatron.planner.orders import stage_specs
from malleus_megatron.planner.pipelines import Layout, PipelineBook
from malleus_megatron.planner.small import best_division, is_small
from malleus_megatron.planner.starts import NodeCuts
from malleus_megatron.planner.state import CutCounts

type Progress = Callable[[float, float], None]
"""Told the best value so far and the proved bound (0: none yet), in seconds."""

GOOD_GAP = 0.003
"""A plan this close to the closed bound needs no search."""
CLOSED_GAP = 0.008
"""A plan this close to its proved bound is good enough."""
CLOSING_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best division found, how its pipelines and nodes are laid out, and what is proved."""

    division: Division
    layouts: tuple[Layout, ...]
    classes: tuple[NodeClass, ...]
    cut_counts: CutCounts
    bound_s: float
    work: int
    """Moves looked at: the deterministic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Will:
    """How to search where it is not exact."""

    seed: int
    thorough: bool
    """Kicks and the proof; else the first climbs only."""


def solve(
    problem: Problem, costs: SearchCosts, will: Will, progress: Progress | None = None
) -> Solution | None:
    """The best plan but for its names; None if none was found."""
    classes = node_classes(problem)
    node_cuts = _node_cuts(costs, classes)
    if is_small(node_cuts):
        return _exact(costs, classes, node_cuts)
    climber = _climbed(costs, classes, node_cuts, will, progress)
    if climber.best is None or climber.best.value_s == float("inf"):
        return None
    bound_s = fluid_s(costs, classes)
    if will.thorough:
        coarse = coarse_classes(classes)
        bound = BoundSearch(costs, coarse, _node_cuts(costs, coarse))
        closing = Closing(steps=CLOSING_STEPS, good_gap=CLOSED_GAP)
        bound_s = close_gap(climber, bound, node_cuts, bound_s, closing)
        if progress is not None:
            progress(climber.best.value_s, bound_s)
    state = climber.best_state
    if state is None:
        return None
    book = PipelineBook(costs, complete=False)
    best = without_idle_stragglers(book, climber.best)
    return Solution(
        division=best,
        layouts=_layouts(book, best),
        classes=classes,
        cut_counts=state.cut_counts,
        bound_s=bound_s,
        work=climber.work,
    )


def fluid_s(costs: SearchCosts, classes: Sequence[NodeClass]) -> float:
    """The closed bound of `cost.bounds`, in seconds."""
    times = dict(costs.time_by_degree)
    sizes = costs.problem.tensor_parallel_sizes
    layers_per_second = sum(len(c.nodes) * node_throughput(c.rates, sizes, times) for c in classes)
    steady_s = fluid_bottleneck_s(costs.num_layers, costs.num_microbatches, layers_per_second)
    if not costs.fill:
        return steady_s
    fastest_s = min(
        times[size] * c.rates[size - 1] for c in classes for size in sizes if size <= len(c.rates)
    )
    return max(
        steady_s,
        fluid_step_time_s(
            costs.num_layers,
            costs.num_microbatches,
            layers_per_second,
            num_pipelines=costs.problem.num_pipelines or costs.num_microbatches,
            fastest_layer_s=fastest_s,
            extra_layers=costs.first_extra + costs.last_extra,
        ),
    )


def _node_cuts(costs: SearchCosts, classes: Sequence[NodeClass]) -> NodeCuts:
    times = dict(costs.time_by_degree)
    sizes = costs.problem.tensor_parallel_sizes
    return [(cuts(c.rates, sizes, times), len(c.nodes)) for c in classes]


def _exact(
    costs: SearchCosts, classes: tuple[NodeClass, ...], node_cuts: NodeCuts
) -> Solution | None:
    book = PipelineBook(costs, complete=True)
    found = best_division(book, node_cuts, costs.problem.num_pipelines)
    if found is None:
        return None
    optimal, cut_counts = found
    division = without_idle_stragglers(book, optimal)
    return Solution(
        division=division,
        layouts=_layouts(book, division),
        classes=classes,
        cut_counts=cut_counts,
        bound_s=division.value_s,
        work=book.evaluations,
    )


def _climbed(
    costs: SearchCosts,
    classes: Sequence[NodeClass],
    node_cuts: NodeCuts,
    will: Will,
    progress: Progress | None,
) -> Climber:
    lowest_s = fluid_s(costs, classes)
    gpus = costs.problem.cluster.num_gpus
    effort = Effort(
        climb=2_000 + 20 * gpus if will.thorough else 500,
        kicks=3_000 + 40 * gpus if will.thorough else 0,
        goal_s=lowest_s * (1 + GOOD_GAP),
        seed=will.seed,
    )
    climber = Climber(costs, node_cuts, lowest_s, effort)
    for numbers in _numbers(costs.problem, classes, climber):
        climber.run(numbers, progress)
    return climber


def _numbers(
    problem: Problem, classes: Sequence[NodeClass], climber: Climber
) -> Iterator[list[int]]:
    """Numbers of pipelines to try: the one asked, or a coarse ladder, then those near the best."""
    if problem.num_pipelines is not None:
        yield [problem.num_pipelines]
        return
    smallest = min(problem.tensor_parallel_sizes)
    groups = sum(len(c.nodes) * (len(c.rates) // smallest) for c in classes)
    most = max(1, min(groups, problem.num_microbatches))
    ladder = {1, most}
    number = 1
    while number < most:
        ladder.add(number)
        number = max(number + 1, number * 5 // 4)
    yield sorted(ladder)
    if climber.best is not None:
        middle = len(climber.best.patterns)
        near = range(max(1, middle - 2), min(most, middle + 2) + 1)
        yield [number for number in near if number not in ladder]


def _layouts(book: PipelineBook, division: Division) -> tuple[Layout, ...]:
    layouts = []
    for pattern, count in zip(division.patterns, division.counts, strict=True):
        layout = book.layout(pattern, count)
        if layout is None:
            raise AssertionError(f"the pipeline {pattern} was chosen but does not fit")
        specs = stage_specs(book.costs, layout.order, count)
        layouts.append(Layout(layout.order, evened(specs, layout.split)))
    return tuple(layouts)
