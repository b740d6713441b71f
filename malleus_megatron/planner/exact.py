"""Small clusters, exactly: the best division of TP groups into pipelines by subsets.

For a limit on the step's value, a pipeline with groups P does at most capacity(P) micro-batches.
The most that D pipelines do is then a sum over a partition of the groups, solved over subsets
(multisets: equal groups are not told apart). If it is enough, a plan below the limit exists and its
own value is the next limit; if for no cut of the nodes it is, the last plan is optimal.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

from malleus_megatron.planner.grouping import Cut, Group
from malleus_megatron.planner.pipelines import Pattern, PipelineBook
from malleus_megatron.planner.state import CutCounts

type Counts = tuple[int, ...]
"""How many groups of each kind."""

STRICT = 1 - 1e-9
"""A better value is better by more than rounding."""


def supplies(cuts_by_class: Sequence[tuple[Sequence[Cut], int]]) -> dict[Pattern, CutCounts]:
    """Every multiset of groups that the nodes can be cut into, and cuts that give it.

    Args:
        cuts_by_class: For each class of equal nodes, its cuts and its number of nodes.
    """
    choices = [
        list(combinations_with_replacement(found, number)) for found, number in cuts_by_class
    ]
    found: dict[Pattern, CutCounts] = {}
    for choice in product(*choices):
        supply = tuple(sorted(group for per_class in choice for cut in per_class for group in cut))
        found.setdefault(
            supply, tuple(tuple(sorted(Counter(per_class).items())) for per_class in choice)
        )
    return found


def num_supplies(cuts_by_class: Sequence[tuple[Sequence[Cut], int]]) -> int:
    """How many choices of cuts `supplies` goes through."""
    total = 1
    for found, number in cuts_by_class:
        for i in range(number):
            total = total * (len(found) + i) // (i + 1)
    return total


def num_subsets(supply: Pattern) -> int:
    """How many multisets of groups can be taken from a supply."""
    total = 1
    for count in Counter(supply).values():
        total *= count + 1
    return total


def divide(
    book: PipelineBook, supply: Pattern, num_pipelines: int | None, limit_s: float
) -> list[Pattern] | None:
    """Pipelines out of the supply that do all micro-batches within the limit, if there are any.

    Args:
        book: What a pipeline can do.
        supply: The groups; some may be left over.
        num_pipelines: None: any number.
        limit_s: Least upper limit on every pipeline's value, in seconds.
    """
    return _Division(book, supply, limit_s).solve(num_pipelines)


class _Division:
    """Most micro-batches over all partitions of each sub-multiset of the supply."""

    def __init__(self, book: PipelineBook, supply: Pattern, limit_s: float) -> None:
        self.kinds: list[Group] = sorted(set(supply))
        counts = Counter(supply)
        self.full: Counts = tuple(counts[kind] for kind in self.kinds)
        self.needed = book.costs.num_microbatches
        self.capacity = {
            chosen: book.capacity(self._pattern(chosen), limit_s)
            for chosen in product(*(range(count + 1) for count in self.full))
            if any(chosen)
        }
        self.memo: dict[tuple[Counts, int], tuple[int, Counts | None]] = {}

    def solve(self, num_pipelines: int | None) -> list[Pattern] | None:
        """The patterns, or None if they cannot do all micro-batches."""
        if num_pipelines is not None:
            return self._found(num_pipelines)
        most = min(sum(self.full), self.needed)
        return next(filter(None, map(self._found, range(1, most + 1))), None)

    def _found(self, num_pipelines: int) -> list[Pattern] | None:
        if self._most(self.full, num_pipelines)[0] < self.needed:
            return None
        patterns: list[Pattern] = []
        left: Counts = self.full
        for number in range(num_pipelines, 0, -1):
            chosen = self._most(left, number)[1]
            if chosen is None:
                return None
            patterns.append(self._pattern(chosen))
            left = _minus(left, chosen)
        return patterns

    def _most(self, left: Counts, number: int) -> tuple[int, Counts | None]:
        """Most micro-batches of `number` pipelines out of `left`, and the first one's groups.

        Either the first kind left is used by some pipeline, and then by this one, or one group
        of it stays unused: pipelines are not told apart, so nothing is missed.
        """
        if number == 0:
            return (0, None)
        if sum(left) < number:
            return (-1, None)
        known = self.memo.get((left, number))
        if known is None:
            known = max(self._options(left, number), key=lambda option: option[0])
            self.memo[left, number] = known
        return known

    def _options(self, left: Counts, number: int) -> Iterator[tuple[int, Counts | None]]:
        kind = next(i for i, count in enumerate(left) if count)
        without = (*left[:kind], left[kind] - 1, *left[kind + 1 :])
        yield self._most(without, number)
        ranges = [range(count + 1) for count in left]
        ranges[kind] = range(1, left[kind] + 1)
        for chosen in product(*ranges):
            able = self.capacity[chosen]
            if able < 1:
                continue
            others = self._most(_minus(left, chosen), number - 1)[0]
            if others >= 0:
                yield (able + others, chosen)

    def _pattern(self, chosen: Counts) -> Pattern:
        return tuple(
            kind for kind, count in zip(self.kinds, chosen, strict=True) for _ in range(count)
        )


def _minus(left: Counts, taken: Counts) -> Counts:
    return tuple(a - b for a, b in zip(left, taken, strict=True))
