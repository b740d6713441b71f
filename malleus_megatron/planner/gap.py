"""Close the gap between the best plan and the bound, from both sides."""

from dataclasses import dataclass

from malleus_megatron.planner.bound import BoundSearch
from malleus_megatron.planner.climbing import Climber
from malleus_megatron.planner.master import Choice, choose
from malleus_megatron.planner.starts import NodeCuts

MOST_CHOICES = 150
"""Pipelines that the integer program may choose from: those that earn most under the prices."""
LIKELY_SHARE = 0.9
"""The bound is first looked for above this share of the best value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """How hard to try."""

    steps: int
    good_gap: float
    """Stop when the best value is within this share of the bound."""


def close_gap(
    climber: Climber, bound: BoundSearch, node_cuts: NodeCuts, low_s: float, closing: Closing
) -> float:
    """Raise the bound and lower the best value in turn; returns the bound, in seconds.

    In the middle between the two there is a proof that no plan is there, or prices that nearly
    prove it; pipelines that earn most under these are put together by an integer program.
    """
    best = climber.best
    if best is None:
        return low_s
    guess_s = best.value_s * LIKELY_SHARE
    if guess_s > low_s and bound.excludes(guess_s, whole=False):
        low_s = guess_s
    low_s = bound.bisect(low_s, best.value_s, whole=False)
    for _ in range(closing.steps):
        high_s = climber.best.value_s if climber.best is not None else best.value_s
        if low_s >= high_s * (1 - closing.good_gap):
            break
        middle_s = (low_s + high_s) / 2
        if bound.excludes(middle_s, whole=True):
            low_s = middle_s
            continue
        for limit_s in (middle_s, (middle_s + high_s) / 2):
            if _assemble(climber, bound, node_cuts, limit_s):
                break
        else:
            low_s = _raised(bound, low_s, middle_s)
            break
    return low_s


def _raised(bound: BoundSearch, low_s: float, high_s: float) -> float:
    """The bound once more, below a limit that was not excluded."""
    for _ in range(2):
        middle_s = (low_s + high_s) / 2
        if bound.excludes(middle_s, whole=True):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def _assemble(climber: Climber, bound: BoundSearch, node_cuts: NodeCuts, limit_s: float) -> bool:
    """Put a plan below the limit together from pipelines that earn most; True if one was found."""
    prices = bound.prices
    capacities = {}
    earnings = {}
    for pattern in {*bound.mixer.met, *climber.patterns}:
        able = climber.capacity(pattern, limit_s)
        if able > 0:
            capacities[pattern] = able
            cost = sum(prices.by_group.get(group, 0.0) for group in pattern)
            earnings[pattern] = able * prices.per_microbatch - cost
    chosen = sorted(capacities, key=lambda pattern: (-earnings[pattern], pattern))[:MOST_CHOICES]
    costs = climber.costs
    state = choose(
        Choice(
            capacities={pattern: capacities[pattern] for pattern in chosen},
            node_cuts=node_cuts,
            num_pipelines=bound.num_pipelines,
            num_microbatches=costs.num_microbatches,
        )
    )
    if state is None:
        return False
    climber.resume(state)
    return True
