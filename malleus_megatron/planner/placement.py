"""Name the GPUs: first which groups share a node, then which node, then which GPU.

Groups of one kind are interchangeable for the objective. Stages with the same layers in different
pipelines sum their gradients, so stages are handed to nodes in the order of their layers: those
with like layers meet in a node. Which of several equal nodes it is, and which GPU takes which place
in it, is then chosen so that as much state as possible is where it was (`naming`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.problem import Problem
from malleus_megatron.planner.grouping import Cut, Group, NodeClass
from malleus_megatron.planner.naming import Holdings, Place, assign_gpus, assign_nodes
from malleus_megatron.planner.orders import Order
from malleus_megatron.planner.state import CutCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPipeline:
    """A pipeline whose groups have no names yet."""

    order: Order
    layers: tuple[int, ...]
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """A stage's place in the plan."""

    pipeline: int
    stage: int
    group: Group
    layers: tuple[int, int]


def place(
    problem: Problem,
    classes: Sequence[NodeClass],
    cut_counts: CutCounts,
    pipelines: Sequence[PlacedPipeline],
) -> Plan:
    """The plan with GPUs.

    Args:
        problem: Says the nodes, the rates and the plan in use.
        classes: Classes of equal nodes.
        cut_counts: How the nodes of each class are cut.
        pipelines: Out of groups of these cuts.
    """
    slots = [
        (node_class, cut)
        for node_class, per_class in enumerate(cut_counts)
        for cut, number in per_class
        for _ in range(number)
    ]
    seated = _seated(_seats(pipelines), [cut for _, cut in slots])
    holdings = Holdings(problem)
    gpus_by_seat: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, node_class in enumerate(classes):
        mine = [
            tuple(Place(seat.group, seat.layers, (seat.pipeline, seat.stage)) for seat in seats)
            for (owner, _), seats in zip(slots, seated, strict=True)
            if owner == number
        ]
        for node, places in zip(
            node_class.nodes, assign_nodes(holdings, node_class, mine), strict=True
        ):
            gpus_by_seat |= assign_gpus(holdings, node, places)
    return _plan(problem, pipelines, gpus_by_seat)


def _seats(pipelines: Sequence[PlacedPipeline]) -> list[_Seat]:
    seats = []
    for number, pipeline in enumerate(pipelines):
        start = 0
        for stage, (group, num_layers) in enumerate(
            zip(pipeline.order, pipeline.layers, strict=True)
        ):
            layers = (start, start + num_layers)
            seats.append(_Seat(pipeline=number, stage=stage, group=group, layers=layers))
            start += num_layers
    return seats


def _seated(seats: Sequence[_Seat], cuts: Sequence[Cut]) -> list[list[_Seat]]:
    """Which stages each cut node serves: in the order of their layers, kind by kind."""
    waiting: dict[Group, list[_Seat]] = defaultdict(list)
    ordered = sorted(seats, key=lambda seat: (sum(seat.layers), seat.pipeline))
    for seat in reversed(ordered):
        waiting[seat.group].append(seat)
    seated = []
    for cut in cuts:
        mine = [waiting[group].pop() for group in cut if waiting[group]]
        seated.append(mine)
    return seated


def _plan(
    problem: Problem,
    pipelines: Sequence[PlacedPipeline],
    gpus_by_seat: dict[tuple[int, int], tuple[int, ...]],
) -> Plan:
    named = []
    for number, pipeline in enumerate(pipelines):
        start, stages = 0, []
        for stage, num_layers in enumerate(pipeline.layers):
            gpus = gpus_by_seat[number, stage]
            stages.append(Stage(gpus=gpus, layers=(start, start + num_layers)))
            start += num_layers
        named.append(Pipeline(num_microbatches=pipeline.num_microbatches, stages=tuple(stages)))
    ordered = tuple(sorted(named, key=lambda pipeline: pipeline.gpus))
    used = {gpu for pipeline in ordered for gpu in pipeline.gpus}
    return Plan(
        num_layers=problem.model.num_layers,
        num_microbatches=problem.num_microbatches,
        pipelines=ordered,
        standby=tuple(gpu for gpu in range(problem.cluster.num_gpus) if gpu not in used),
    )
