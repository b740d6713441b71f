"""What happened, in one sentence."""

from malleus_megatron.pages.history import History, Step
from malleus_megatron.pages.phases import Straggler, median_step_s
from malleus_megatron.pages.scales import in_words, seconds, short

_MOST_NAMED = 4


def headline(history: History, stragglers: tuple[Straggler, ...]) -> str:
    """Which GPUs were slow, when the plan changed, and what a step took meanwhile."""
    steps = list(history.steps)
    changes = [event.iteration for event in history.of_kind("plan")]
    if not steps:
        return "No iteration has ended yet."
    if not stragglers:
        gap = _gap(history)
        told = f" that {'was' if history.num_iterations == 1 else 'were'} told" if gap else ""
        parts = [f"No straggler was found in {_iterations(history.num_iterations)}{told}", gap]
        parts += [_changed(changes)] if changes else []
        return _sentence([*parts, f"a step took {seconds(median_step_s(steps))} (median)"])
    first = min(straggler.since for straggler in stragglers)
    later = [iteration for iteration in changes if iteration > first]
    begun = [straggler.since for straggler in stragglers]
    spans = _around_changes(steps, begun, later) if later else _while_slow(steps, first, stragglers)
    times = [(median_step_s(own), when) for when, own in spans]
    took = in_words([f"{seconds(time_s)} {when}" for time_s, when in times if time_s is not None])
    return _sentence(
        [
            _who(stragglers, first),
            _recovered(stragglers),
            _changed(later),
            f"a step took {took}" if took else "",
            _gap(history),
        ]
    )


def _gap(history: History) -> str:
    """What of the log could not be written."""
    gaps = history.of_kind("missing")
    if not gaps:
        return ""
    lines = sum(gap.integer("lines") or 0 for gap in gaps)
    return f"{lines} lines from iteration {gaps[0].text('since')} on are missing"


def _who(stragglers: tuple[Straggler, ...], first: int) -> str:
    gpus = sorted({straggler.gpu for straggler in stragglers})
    slowest = max(stragglers, key=lambda one: (one.peak_rate or 0, -one.gpu))
    if len(gpus) == 1:
        rate = "" if slowest.peak_rate is None else f" to rate {short(slowest.peak_rate, 3)}"
        how = "failed" if rate.endswith("inf") else f"slowed down{rate}"
        return f"GPU {gpus[0]} {how} at iteration {first}"
    named = f"{len(gpus)} GPUs" if len(gpus) > _MOST_NAMED else f"GPUs {in_words(gpus)}"
    rate = "" if slowest.peak_rate is None else f" (rate {short(slowest.peak_rate, 3)})"
    return f"{named} slowed down from iteration {first} on, GPU {slowest.gpu} the most{rate}"


def _recovered(stragglers: tuple[Straggler, ...]) -> str:
    ended = [one for one in stragglers if one.recovered is not None]
    still = [one for one in stragglers if one.recovered is None]
    if not ended:
        return ""
    if still:
        back = len({one.gpu for one in ended} - {one.gpu for one in still})
        return f"{back} of them recovered" if back else ""
    last = max(one.recovered or 0 for one in ended)
    return f"{'recovered' if len(ended) == 1 else 'all recovered'} by iteration {last}"


def _changed(changes: list[int]) -> str:
    if not changes:
        return "the plan did not change"
    if len(changes) <= _MOST_NAMED:
        at = f"iteration{'s' * (len(changes) > 1)} {in_words(changes)}"
        return f"the plan changed at {at}"
    return f"the plan changed {len(changes)} times, from iteration {changes[0]} to {changes[-1]}"


type _Spans = list[tuple[str, list[Step]]]


def _while_slow(steps: list[Step], first: int, stragglers: tuple[Straggler, ...]) -> _Spans:
    """Where no plan changed: before, and until the last one has recovered."""
    before = ("before", [step for step in steps if step.iteration < first])
    if any(one.recovered is None for one in stragglers):
        return [before, ("since then", [step for step in steps if step.iteration >= first])]
    end = max(one.recovered or 0 for one in stragglers)
    return [
        before,
        ("until then", [step for step in steps if first <= step.iteration < end]),
        ("after that", [step for step in steps if step.iteration >= end]),
    ]


def _around_changes(steps: list[Step], begun: list[int], changes: list[int]) -> _Spans:
    """Before, until the plan changed, under the new one, and under the last one.

    What another GPU costs that slows down later is not the new plan's.
    """
    first, change = min(begun), changes[0]
    ends = [*changes[1:2], *(since for since in begun if since > change)]
    until = min(ends, default=steps[-1].iteration + 1)
    spans = [
        ("before", [step for step in steps if step.iteration < first]),
        ("until the plan changed", [step for step in steps if first <= step.iteration < change]),
        ("under the new plan", [step for step in steps if change <= step.iteration < until]),
    ]
    if len(changes) > 1:
        spans.append(("under the last one", [s for s in steps if s.iteration >= changes[-1]]))
    return spans


def _iterations(count: int) -> str:
    return "1 iteration" if count == 1 else f"{count} iterations"


def _sentence(parts: list[str]) -> str:
    return "; ".join(filter(None, parts)) + "."
