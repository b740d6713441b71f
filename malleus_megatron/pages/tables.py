"""Tables of a page: generations, stragglers, migrations, memory, events, runs."""

from collections.abc import Iterable, Sequence

from malleus_megatron.pages.history import Event
from malleus_megatron.pages.markup import Markup, join, tag
from malleus_megatron.pages.phases import Memory, Move, Phase, Straggler
from malleus_megatron.pages.rate_map import swatch
from malleus_megatron.pages.scales import UNKNOWN, mebibytes, seconds, short
from malleus_megatron.pages.words import KINDS, describe, kind_of

_MOST_ROWS = 200
_MOST_MEMORY_ROWS = 64
_LONG = 180
"""Letters of a text that are shown at once."""


def generations(phases: Sequence[Phase]) -> Markup:
    """What a step took under each plan, the latest first."""
    rows = [
        _row(
            str(phase.generation),
            f"{phase.first} to {phase.last}" if phase.num_iterations else f"from {phase.first}",
            seconds(phase.median_s),
            f"{short(phase.lowest_s)} to {short(phase.highest_s)}",
            seconds(phase.predicted_s),
            seconds(phase.planning_s),
            _folded(phase.layout or ("the recipe's own" if phase.generation == 0 else UNKNOWN)),
        )
        for phase in reversed(phases)
    ]
    heads = ("Generation", "Iterations", "Median step", "Lowest to highest, s", "Predicted")
    return _table("generations", (*heads, "Planning", "Plan"), rows)


def straggler_table(stragglers: Sequence[Straggler]) -> Markup:
    """Those that are slow now first, then the latest."""
    ordered = sorted(stragglers, key=lambda one: (one.recovered is not None, -one.named, one.gpu))
    rows = [
        _row(
            join([swatch(one.peak_rate), str(one.gpu)]),
            short(one.rate, 3),
            short(one.peak_rate, 3),
            str(one.since),
            str(one.named),
            "still slow" if one.recovered is None else str(one.recovered),
            one.reason or "nothing known sets it apart",
        )
        for one in ordered
    ]
    heads = ("GPU", "Rate when named", "Highest", "Since iteration", "Named after", "Recovered")
    return _table("stragglers", (*heads, "Likely reason"), rows)


def migrations(moves: Sequence[Move]) -> Markup:
    """The latest first."""
    rows = [
        _row(
            str(move.iteration),
            UNKNOWN if move.generation is None else str(move.generation),
            mebibytes(move.num_bytes),
            seconds(move.seconds),
            seconds(move.predicted_s),
            mebibytes(move.peak_extra_bytes),
        )
        for move in reversed(moves)
    ]
    heads = ("Iteration", "Generation", "Moved", "Took", "Predicted", "Memory beyond the state")
    return _table("migrations", heads, rows)


def memory_table(memory: Memory) -> Markup:
    """The GPUs with the most memory first."""
    used = list(enumerate(memory.measured_mib))
    used.sort(key=lambda pair: -(pair[1] or 0.0))
    predicted = dict(enumerate(memory.predicted_mib))
    rows = [
        _row(str(gpu), f"{short(mib)} MiB", _mib(predicted.get(gpu)), _part(mib, memory.usable_mib))
        for gpu, mib in used[:_MOST_MEMORY_ROWS]
    ]
    table = _table("memory", ("GPU", "Peak of a step", "Predicted", "Of what plans may use"), rows)
    return join([table, _rest(len(used) - len(rows), "more GPUs, with less")])


def events_table(events: Sequence[Event], num_events: int) -> Markup:
    """The latest first. Kinds can be hidden by their boxes, which need no script."""
    present = {kind_of(event) for event in events}
    boxes = [
        tag(
            "label",
            tag("input", type="checkbox", id=f"show-{kind}", checked=True),
            kind,
            class_="choice",
        )
        for kind in (*KINDS, "other")
        if kind in present
    ]
    find = tag(
        "label",
        "Find ",
        tag("input", type="search", id="find", autocomplete="off"),
        class_="find",
        hidden=True,
    )
    rows = [
        tag(
            "tr",
            tag("td", str(event.iteration), class_="number"),
            tag("td", event.kind),
            tag("td", _folded(describe(event)), class_="text"),
            class_=f"event kind-{kind_of(event)}",
        )
        for event in events
    ]
    older = _rest(num_events - len(events), "older events are not shown")
    return join(
        [
            tag("p", *boxes, find, class_="choices"),
            _table("events", ("Iteration", "Event", "What"), rows, most=len(rows)),
            older,
        ]
    )


def _table(
    name: str, heads: Iterable[str], rows: Sequence[Markup], *, most: int = _MOST_ROWS
) -> Markup:
    """Scrolls by itself where it is too wide, so that the page does not."""
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *rows[:most]),
    )
    box = tag("div", table, class_=f"scroll {name}", tabindex="0", role="region", aria_label=name)
    return join([box, _rest(len(rows) - most, "older ones are not shown")])


def _row(*cells: str) -> Markup:
    """All but the last are short; the last one may be a text."""
    short_ones = [tag("td", cell, class_="number") for cell in cells[:-1]]
    return tag("tr", *short_ones, tag("td", cells[-1], class_="text"))


def _folded(text: str) -> Markup:
    """A long text begins, and the reader may open the rest."""
    if len(text) <= _LONG:
        return join([text])
    return tag("details", tag("summary", f"{text[:_LONG]} …"), f"… {text[_LONG:]}")


def _rest(count: int, what: str) -> Markup | None:
    return tag("p", f"{count} {what}.", class_="note") if count > 0 else None


def _mib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{short(value)} MiB"


def _part(value: float | None, whole: float | None) -> str:
    return UNKNOWN if value is None or not whole else f"{100 * value / whole:.0f} %"
