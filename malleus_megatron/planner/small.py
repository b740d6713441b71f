"""The exact search for small clusters: every cut of the nodes, every division into pipelines."""

from collections.abc import Sequence
from math import inf

from malleus_megatron.planner.division import Division, divided
from malleus_megatron.planner.exact import STRICT, divide, num_subsets, num_supplies, supplies
from malleus_megatron.planner.grouping import Cut
from malleus_megatron.planner.pipelines import Pattern, PipelineBook

MAX_SUPPLIES = 600
MAX_SUBSETS = 300
MAX_GPUS = 8


def is_small(cuts_by_class: Sequence[tuple[Sequence[Cut], int]]) -> bool:
    """True if trying all cuts and all subsets of groups is a matter of a second or so."""
    largest = [
        max((sum(size for size, _ in cut) for cut in found), default=0) * number
        for found, number in cuts_by_class
    ]
    return sum(largest) <= MAX_GPUS and num_supplies(cuts_by_class) <= MAX_SUPPLIES


def best_division(
    book: PipelineBook,
    cuts_by_class: Sequence[tuple[Sequence[Cut], int]],
    num_pipelines: int | None,
    start: Division | None = None,
) -> Division | None:
    """The optimal division; None if none is feasible.

    Args:
        book: A complete one.
        cuts_by_class: For each class of equal nodes, its undominated cuts and its number of nodes.
        num_pipelines: None: any number.
        start: A division to be beaten.
    """
    best = start
    for supply in _widest_first(supplies(cuts_by_class)):
        while True:
            limit_s = inf if best is None else best.value_s * STRICT
            patterns = divide(book, supply, num_pipelines, min(limit_s, 1e30))
            if patterns is None:
                break
            best = divided(book, patterns)
    return best


def _widest_first(found: list[Pattern]) -> list[Pattern]:
    return sorted(found, key=lambda supply: (num_subsets(supply), supply))
