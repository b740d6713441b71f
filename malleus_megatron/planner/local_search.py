"""Improve a plan by small moves, towards a limit on its value that falls with each success.

For a limit, every pipeline has a capacity in micro-batches, and the capacities add up. A plan below
the limit exists where they reach the step's number. So the search climbs a sum, in which a move
changes two or three terms, rather than a maximum, which most moves leave as it is.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

from malleus_megatron.planner.division import Division, divided
from malleus_megatron.planner.exact import STRICT
from malleus_megatron.planner.grouping import Cut, Group
from malleus_megatron.planner.pipelines import Pattern, PipelineBook
from malleus_megatron.planner.starts import NodeCuts
from malleus_megatron.planner.state import (
    CutCounts,
    Move,
    State,
    applied,
    difference,
    distinct,
    recut,
    split_by,
    with_group,
    without_all,
    without_group,
)

FRACTION = 0.25
"""What a fraction of a micro-batch is worth beside a whole one: it shows the way to the next."""
LEAST_GAIN = 1e-6
NEW_PATTERN = 8
"""A pattern not scored before takes the time of so many moves."""
RECUT_SHARE = 0.4
"""Of random moves."""
MOST_CHANGED = 6
"""Groups lost and won by cutting one node otherwise; more change comes in steps."""
HOPELESS = -1000.0
"""Score of a pipeline that cannot do one micro-batch, so that any that can is better."""


class LocalSearch:
    """One climb from one start. Stops at the deterministic budget, or when told to."""

    def __init__(
        self,
        book: PipelineBook,
        node_cuts: NodeCuts,
        *,
        limit_s: float,
        budget: int,
        goal_s: float = 0.0,
    ) -> None:
        self.book = book
        self.node_cuts = node_cuts
        self.budget = budget
        self.work = 0
        """The deterministic clock: moves looked at, and patterns met for the first time."""
        self.goal_s = goal_s
        self.best: Division | None = None
        self.best_state: State | None = None
        self._limit_s = limit_s
        self._scores: dict[Pattern, float] = {}
        self._differences: dict[tuple[int, Cut], list[tuple[Cut, Pattern, Pattern]]] = {}

    @property
    def done(self) -> bool:
        """Out of budget, or as good as was asked."""
        return self.work >= self.budget or (
            self.best is not None and self.best.value_s <= self.goal_s
        )

    def climb(self, state: State) -> State:
        """Take improving moves until there are none."""
        state = self._note(state)
        improved = True
        while improved and not self.done:
            improved = False
            for moves in (transfers, swaps, self.recuts):
                better = self._improved(state, moves)
                if better is not None:
                    state = self._note(better)
                    improved = True
        return state

    def kick(self, state: State, random: Random) -> State:
        """One to three random moves away from a state."""
        for _ in range(random.randint(1, 3)):
            moves = self._random_recut(state, random) if random.random() < RECUT_SHARE else []
            if not moves:
                few = [random.randrange(len(state.patterns)) for _ in range(2)]
                moves = [*transfers(state, few), *swaps(state, few)]
            if moves:
                state = applied(state, random.choice(moves))
        return state

    def _random_recut(self, state: State, random: Random) -> list[Move]:
        node_class = random.randrange(len(state.cut_counts))
        old, _ = random.choice(state.cut_counts[node_class])
        options = self._recuts_of(node_class, old)
        if not options:
            return []
        new, removed, added = random.choice(options)
        changed = recut(state.cut_counts, node_class, old, new)
        where = (Counter(state.spare), distinct(state.patterns))
        return list(self._exchanged(state, where, removed, added, changed))

    def score(self, pattern: Pattern) -> float:
        """Whole micro-batches below the limit, and a part of the fraction."""
        known = self._scores.get(pattern)
        if known is None:
            self.work += NEW_PATTERN
            real = self.book.real_capacity(pattern, self._limit_s) if pattern else 0.0
            whole = self.book.capacity(pattern, self._limit_s) if pattern else 0
            known = whole + FRACTION * (real - whole) if whole >= 1 else HOPELESS + len(pattern)
            self._scores[pattern] = known
        return known

    def total(self, state: State) -> float:
        """The sum to climb."""
        return sum(map(self.score, state.patterns))

    @property
    def home(self) -> float:
        """The sum at the best state, under the present limit."""
        return 0.0 if self.best_state is None else self.total(self.best_state)

    def _note(self, state: State) -> State:
        """Keep the state if it is the best so far, and lower the limit."""
        needed = self.book.costs.num_microbatches
        limit_s = self._limit_s
        if self.best is None or (
            sum(self.book.capacity(p, limit_s) for p in state.patterns) >= needed
        ):
            division = divided(self.book, state.patterns)
            if self.best is None or division.value_s < self.best.value_s * STRICT:
                self.best, self.best_state = division, state
                if division.value_s < float("inf"):
                    self._limit_s = division.value_s * STRICT
                    self._scores.clear()
        return state

    def _improved(self, state: State, moves: Callable[[State], Iterator[Move]]) -> State | None:
        """The state after improving moves of one kind, each taken when met; None if none is."""
        found = None
        again = True
        while again and not self.done:
            again = False
            for move in moves(state):
                if self._change(state, move) > LEAST_GAIN:
                    state = found = self._note(applied(state, move))
                    again = True
                    break
        return found

    def _change(self, state: State, move: Move) -> float:
        self.work += 1
        return sum(self.score(new) - self.score(state.patterns[i]) for i, new in move.patterns)

    def recuts(self, state: State) -> Iterator[Move]:
        """Cut one node otherwise; its new groups go where they help most."""
        seen: set[tuple[Pattern, Pattern]] = set()
        spare = Counter(state.spare)
        places = distinct(state.patterns)
        for node_class, per_class in enumerate(state.cut_counts):
            for old, _ in per_class:
                for new, removed, added in self._recuts_of(node_class, old):
                    if (removed, added) not in seen:
                        seen.add((removed, added))
                        changed = recut(state.cut_counts, node_class, old, new)
                        yield from self._exchanged(state, (spare, places), removed, added, changed)

    def _recuts_of(self, node_class: int, old: Cut) -> list[tuple[Cut, Pattern, Pattern]]:
        """Other cuts of a node that are not too different: groups lost, groups won."""
        known = self._differences.get((node_class, old))
        if known is None:
            found = self.node_cuts[node_class][0]
            pairs = [(new, difference(old, new), difference(new, old)) for new in found]
            known = [pair for pair in pairs if 0 < len(pair[1]) + len(pair[2]) <= MOST_CHANGED]
            self._differences[node_class, old] = known
        return known

    def _exchanged(
        self,
        state: State,
        where: tuple[Counter[Group], list[int]],
        removed: Pattern,
        added: Pattern,
        cut_counts: CutCounts,
    ) -> Iterator[Move]:
        """Take the old groups from the spare ones or from one pipeline; place the new ones."""
        spare, places = where
        spared, missing = split_by(spare, removed)
        for index in places if missing else [None]:
            patterns: dict[int, Pattern] = {}
            if index is not None:
                rest = without_all(state.patterns[index], missing)
                if rest is None:
                    continue
                patterns[index] = rest
            kept = self._place(state, patterns, added, places)
            yield Move(
                patterns=tuple(patterns.items()),
                spare_less=spared,
                spare_more=tuple(kept),
                cut_counts=cut_counts,
            )

    def _place(
        self, state: State, patterns: dict[int, Pattern], added: Pattern, places: list[int]
    ) -> list[Group]:
        """Each group to the pipeline that gains most by it; the groups that nobody wants."""
        kept = []
        home = list(patterns)
        for group in reversed(added):
            best, best_gain = None, LEAST_GAIN
            for i in home + [place for place in places if place not in home]:
                pattern = patterns.get(i, state.patterns[i])
                gain = self.score(with_group(pattern, group)) - self.score(pattern)
                if gain > best_gain:
                    best, best_gain = i, gain
            if best is None:
                kept.append(group)
            else:
                patterns[best] = with_group(patterns.get(best, state.patterns[best]), group)
        return kept


def transfers(state: State, pipelines: list[int] | None = None) -> Iterator[Move]:
    """One group to another pipeline, to the spare ones, or from them."""
    places = distinct(state.patterns) if pipelines is None else sorted(set(pipelines))
    for source in places:
        pattern = state.patterns[source]
        if len(pattern) == 1:
            continue
        targets = _others(state, source, places)
        for group in sorted(set(pattern)):
            less = (source, without_group(pattern, group))
            yield Move(patterns=(less,), spare_more=(group,))
            for target in targets:
                more = (target, with_group(state.patterns[target], group))
                yield Move(patterns=(less, more))
    for group in sorted(set(state.spare)):
        for target in places:
            more = (target, with_group(state.patterns[target], group))
            yield Move(patterns=(more,), spare_less=(group,))


def swaps(state: State, pipelines: list[int] | None = None) -> Iterator[Move]:
    """Two unlike groups change places."""
    places = distinct(state.patterns) if pipelines is None else sorted(set(pipelines))
    for i in places:
        mine = state.patterns[i]
        for given in sorted(set(mine)):
            rest = without_group(mine, given)
            for group in sorted(set(state.spare) - {given}):
                yield Move(
                    patterns=((i, with_group(rest, group)),),
                    spare_less=(group,),
                    spare_more=(given,),
                )
            for j in (place for place in places if place > i):
                theirs = state.patterns[j]
                for group in sorted(set(theirs) - {given}):
                    other = with_group(without_group(theirs, group), given)
                    yield Move(patterns=((i, with_group(rest, group)), (j, other)))


def _others(state: State, source: int, places: list[int]) -> list[int]:
    """A pipeline of each pattern, not the source itself but perhaps one equal to it."""
    same = state.patterns[source]
    twins = (i for i, pattern in enumerate(state.patterns) if i != source and pattern == same)
    twin = next(twins, None)
    return [place for place in places if place != source] + ([] if twin is None else [twin])
