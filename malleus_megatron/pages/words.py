"""An event as a sentence."""

import json
import math
from collections.abc import Callable, Mapping

from malleus_megatron.pages.history import Event, number
from malleus_megatron.pages.phases import predicted_step_s
from malleus_megatron.pages.scales import mebibytes, seconds, short

KINDS = (
    "straggler",
    "recovered",
    "plan",
    "migration",
    "warning",
    "memory",
    "replica",
    "injection",
    "level",
)
"""Those that a reader may hide by name; any other is `other`."""

_MOST_LETTERS = 400


def describe(event: Event) -> str:
    """What it says; an unknown one as it is."""
    known = _DESCRIBED.get(event.kind)
    text = "" if known is None else known(event)
    return text or _as_it_is(event.values)


def kind_of(event: Event) -> str:
    """One of KINDS, or other."""
    return event.kind if event.kind in KINDS else "other"


def _as_it_is(values: Mapping[str, object]) -> str:
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def _straggler(event: Event) -> str:
    since, reason = event.integer("since"), event.text("reason")
    parts = [f"GPU {event.text('gpu')} at rate {short(event.number('rate'), 3)}"]
    parts += [] if since is None else [f"since iteration {since}"]
    return ", ".join([*parts, *([f"likely: {reason}"] if reason else [])])


def _recovered(event: Event) -> str:
    return f"GPU {event.text('gpu')}, rate {short(event.number('rate'), 3)}"


def _plan(event: Event) -> str:
    predicted = predicted_step_s(event)
    expected = "" if predicted is None else f"; predicted step {seconds(predicted)}"
    return f"{event.text('generation')}: {event.text('layout')}{expected}"


def _migration(event: Event) -> str:
    return f"{mebibytes(event.number('bytes'))} in {seconds(event.number('seconds'))}"


def _memory(event: Event) -> str:
    listed = event.values.get("measured_mib")
    used = [number(value) or 0.0 for value in listed] if isinstance(listed, list) else []
    if not used:
        return ""
    usable = event.number("usable_mib")
    room = "" if usable is None or math.isnan(usable) else f" of {short(usable)} MiB"
    return f"at most {short(max(used))}{room} in a step, on GPU {used.index(max(used))}"


def _replica(event: Event) -> str:
    return (
        f"GPU {event.text('gpu')} differs in {event.text('state')} of {event.text('parameter')}; "
        f"{event.text('action')}"
    )


def _injection(event: Event) -> str:
    start, end = event.integer("from_iteration"), event.integer("to_iteration")
    until = "on" if end is None else f"until before {end}"
    return f"GPU {event.text('gpu')}: rate {event.text('rate')} from iteration {start} {until}"


def _missing(event: Event) -> str:
    return f"{event.text('lines')} lines from iteration {event.text('since')} on were not written"


_DESCRIBED: Mapping[str, Callable[[Event], str]] = {
    "straggler": _straggler,
    "recovered": _recovered,
    "plan": _plan,
    "migration": _migration,
    "memory": _memory,
    "replica": _replica,
    "injection": _injection,
    "level": lambda event: f"{event.text('level')}: {event.text('reason')}",
    "warning": lambda event: event.text("message"),
    "missing": _missing,
}
