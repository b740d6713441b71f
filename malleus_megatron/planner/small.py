"""The exact search for small clusters: every cut of the nodes, every division into pipelines."""

from collections.abc import Sequence
from math import inf

from malleus_megatron.planner.division import Division, divided
from malleus_megatron.planner.exact import STRICT, divide, num_subsets, num_supplies, supplies
from malleus_megatron.planner.grouping import Cut
from malleus_megatron.planner.pipelines import PipelineBook
from malleus_megatron.planner.state import CutCounts

MAX_SUPPLIES = 600
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
) -> tuple[Division, CutCounts] | None:
    """The optimal division and the cuts that it needs; None if none is feasible.

    Args:
        book: A complete one.
        cuts_by_class: For each class of equal nodes, its undominated cuts and its number of nodes.
        num_pipelines: None: any number.
    """
    best: Division | None = None
    needed: CutCounts = ()
    by_supply = supplies(cuts_by_class)
    for supply in sorted(by_supply, key=lambda supply: (num_subsets(supply), supply)):
        while True:
            limit_s = inf if best is None else best.value_s * STRICT
            patterns = divide(book, supply, num_pipelines, min(limit_s, 1e30))
            if patterns is None:
                break
            best, needed = divided(book, patterns), by_supply[supply]
    return None if best is None else (best, needed)
