"""Where a local search stands: how nodes are cut, which groups each pipeline has, what is spare."""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from malleus_megatron.planner.grouping import Cut, Group
from malleus_megatron.planner.pipelines import Pattern

type CutCounts = tuple[tuple[tuple[Cut, int], ...], ...]
"""For each class of nodes, how many nodes are cut how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Only kinds and counts: nodes and groups that are equal are not told apart."""

    cut_counts: CutCounts
    patterns: tuple[Pattern, ...]
    """The groups of each pipeline."""
    spare: Pattern
    """Groups in no pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of state, not yet made."""

    patterns: tuple[tuple[int, Pattern], ...]
    """New groups of some pipelines."""
    spare_less: Pattern = ()
    spare_more: Pattern = ()
    cut_counts: CutCounts | None = None


def applied(state: State, move: Move) -> State:
    """The state after a move."""
    patterns = list(state.patterns)
    for index, pattern in move.patterns:
        patterns[index] = pattern
    spare = Counter(state.spare)
    spare.subtract(move.spare_less)
    spare.update(move.spare_more)
    return State(
        cut_counts=state.cut_counts if move.cut_counts is None else move.cut_counts,
        patterns=tuple(patterns),
        spare=tuple(sorted(spare.elements())),
    )


def supply_of(cut_counts: CutCounts) -> Counter[Group]:
    """All groups that the nodes give."""
    supply: Counter[Group] = Counter()
    for per_class in cut_counts:
        for cut, number in per_class:
            for group in cut:
                supply[group] += number
    return supply


def with_group(pattern: Pattern, group: Group) -> Pattern:
    """One group more."""
    index = bisect(pattern, group)
    return (*pattern[:index], group, *pattern[index:])


def without_group(pattern: Pattern, group: Group) -> Pattern:
    """One group less."""
    index = pattern.index(group)
    return pattern[:index] + pattern[index + 1 :]


def without_all(pattern: Pattern, groups: Pattern) -> Pattern | None:
    """Some groups less; None if they are not all there."""
    rest = list(pattern)
    for group in groups:
        if group not in rest:
            return None
        rest.remove(group)
    return tuple(rest)


def split_by(stock: Counter[Group], wanted: Pattern) -> tuple[Pattern, Pattern]:
    """What of the wanted groups is in stock, and what is not."""
    left = {group: stock[group] for group in wanted}
    have: list[Group] = []
    miss: list[Group] = []
    for group in wanted:
        (have if left[group] > 0 else miss).append(group)
        left[group] -= 1
    return tuple(have), tuple(miss)


def difference(more: Cut, less: Cut) -> Pattern:
    """Groups of one cut that the other has not, with multiplicity."""
    return tuple(sorted((Counter(more) - Counter(less)).elements()))


def recut(cut_counts: CutCounts, node_class: int, old: Cut, new: Cut) -> CutCounts:
    """One node of a class cut otherwise."""
    counts = Counter(dict(cut_counts[node_class]))
    counts[old] -= 1
    counts[new] += 1
    changed = tuple(sorted((cut, number) for cut, number in counts.items() if number))
    return (*cut_counts[:node_class], changed, *cut_counts[node_class + 1 :])


def distinct(patterns: Sequence[Pattern]) -> list[int]:
    """One pipeline of each pattern."""
    first: dict[Pattern, int] = {}
    for index, pattern in enumerate(patterns):
        first.setdefault(pattern, index)
    return list(first.values())
