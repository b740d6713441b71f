"""The page: one HTML document that needs nothing from outside and may ask for nothing."""

import base64
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from malleus_megatron.pages import tables
from malleus_megatron.pages.chart import Chart, Level, draw_chart
from malleus_megatron.pages.markup import Markup, join, tag
from malleus_megatron.pages.plan_picture import draw_plan
from malleus_megatron.pages.rate_map import draw_rates
from malleus_megatron.pages.scales import seconds, short
from malleus_megatron.pages.story import Place, Story

_MOST_EARLIER_PLANS = 12
_REFRESH_WITHOUT_SCRIPT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stands around the numbers."""

    title: str
    source: str
    """Where the numbers come from."""
    notes: Sequence[str] = ()
    """What could not be read, or is not known."""
    runs: Sequence[str] = ()
    """One line for each run in the file, where there are several."""
    is_live: bool = False
    """Whether the page asks its server for news."""


def make_page(story: Story, frame: Frame) -> str:
    """The whole document."""
    style, script = _asset("style.css"), _asset("page.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=content_policy(is_live=frame.is_live),
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        _reload() if frame.is_live else None,
        tag("title", frame.title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("main", *_sections(story, frame), id="page", data_live=frame.is_live),
        tag("p", "", id="lost", role="status", hidden=True) if frame.is_live else None,
        tag("script", Markup(script)),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


@functools.cache
def content_policy(*, is_live: bool) -> str:
    """What a browser may load and run: the page's own style and script, and its own server."""
    policy = {
        "default-src": "'none'",
        "style-src": _hash(_asset("style.css")),
        "script-src": _hash(_asset("page.js")),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if is_live:
        policy["connect-src"] = "'self'"
    return "; ".join(f"{name} {value}" for name, value in policy.items())


@functools.cache
def _asset(name: str) -> str:
    return resources.files("malleus_megatron.pages").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _reload() -> Markup:
    return tag(
        "noscript", tag("meta", http_equiv="refresh", content=str(_REFRESH_WITHOUT_SCRIPT_S))
    )


def _sections(story: Story, frame: Frame) -> Iterator[Markup]:
    yield tag(
        "header",
        tag("p", frame.source, class_="source"),
        tag("h1", story.headline),
        _tiles(story),
    )
    yield from _section("Plan", _plans(story))
    yield from _section("Straggling rates", _rates(story))
    yield from _section("Step time", _step_times(story))
    yield from _section("Loss", _losses(story))
    if story.phases:
        yield from _section("Generations", tables.generations(story.phases))
    if story.stragglers:
        yield from _section("Stragglers", tables.straggler_table(story.stragglers))
    if story.moves:
        yield from _section("Migrations", tables.migrations(story.moves))
    if story.memory is not None:
        yield from _section("Memory", tables.memory_table(story.memory))
    yield from _section("Events", tables.events_table(story.events, story.num_events))
    about = [*frame.notes, *([f"level {story.level}: {story.level_reason}"] if story.level else [])]
    yield tag(
        "footer",
        *(tag("p", line, class_="note") for line in about),
        tag("ul", *(tag("li", line) for line in frame.runs), class_="note") if frame.runs else None,
    )


def _section(title: str, content: Markup) -> Iterator[Markup]:
    name = title.lower().replace(" ", "-")
    yield tag(
        "section", tag("h2", title, id=f"{name}-head"), content, aria_labelledby=f"{name}-head"
    )


def _tiles(story: Story) -> Markup:
    latest = story.latest_phase
    predicted = latest.predicted_s if latest else None
    now = story.now
    standby = (
        f", {len(now.plan.standby)} on standby" if now is not None and now.plan.standby else ""
    )
    slow = sorted({one.gpu for one in story.active})
    named = ", ".join(map(str, slow[:6])) + (" …" if len(slow) > 6 else "")
    tiles = (
        ("iteration", str(story.last_iteration), "the last that has ended"),
        ("step time", seconds(story.last_step_s), "the last step"),
        (
            "under this plan",
            seconds(latest.median_s if latest else None),
            "median" if predicted is None else f"median; predicted {seconds(predicted)}",
        ),
        ("stragglers", str(len(slow)), f"GPU {named}" if slow else "none now"),
        (
            "generation",
            str(latest.generation if latest else 0),
            f"{story.num_gpus or 'unknown number of'} GPUs{standby}",
        ),
        ("loss", short(story.last_loss, 6), "of the last step"),
    )
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", note))
            for name, value, note in tiles
        ),
        class_="tiles",
    )


def _plans(story: Story) -> Markup:
    now = story.now
    earlier = [place for place in story.places if place is not now]
    if now is None:
        shown = tag("p", "The stages of the plan in force are not known here.", class_="note")
    else:
        shown = draw_plan(now.plan, now.rates)
    return join(
        [
            tag("p", f"Generation {now.generation}, in force.", class_="note") if now else None,
            shown,
            *(_earlier(place) for place in reversed(earlier[-_MOST_EARLIER_PLANS:])),
        ]
    )


def _earlier(place: Place) -> Markup:
    name = f"plan-{place.generation}"
    return tag(
        "details",
        tag("summary", f"Generation {place.generation}, with the rates of its beginning"),
        draw_plan(place.plan, place.rates),
        id=name,
    )


def _rates(story: Story) -> Markup:
    if story.rates is None:
        return tag("p", "No rates were told yet.", class_="note")
    return draw_rates(story.rates)


def _step_times(story: Story) -> Markup:
    if not story.step_times:
        return tag("p", "No step times were told.", class_="note")
    levels = tuple(
        Level(first=phase.first, last=phase.last, value=phase.predicted_s)
        for phase in story.phases
        if phase.predicted_s is not None and phase.num_iterations
    )
    chart = Chart(
        title="seconds, by iteration",
        what=f"Step time over iterations {story.first_iteration} to {story.last_iteration}. "
        + story.headline,
        first=story.first_iteration,
        last=story.last_iteration,
        points=story.step_times,
        iterations_per_point=story.iterations_per_point,
        levels=levels,
        marks=story.marks,
        from_zero=True,
    )
    return join([draw_chart(chart), _key(story, has_levels=bool(levels)), _of_points(story)])


def _losses(story: Story) -> Markup:
    bad = story.num_bad_losses
    note = f"The loss of {bad} iterations is no finite number." if bad else None
    if not story.losses:
        return tag("p", note or "No loss was told.", class_="note")
    chart = Chart(
        title="loss, by iteration",
        what=f"Loss: {short(story.losses[0].middle)} at first, {short(story.losses[-1].middle)} "
        "at last.",
        first=story.first_iteration,
        last=story.last_iteration,
        points=story.losses,
        iterations_per_point=story.iterations_per_point,
        marks=tuple(mark for mark in story.marks if mark.kind == "plan"),
    )
    return join([draw_chart(chart), tag("p", note, class_="note") if note else None])


def _key(story: Story, *, has_levels: bool) -> Markup:
    """What lines and signs mean, as far as they are there."""
    kinds = {mark.kind for mark in story.marks}
    signs = (
        ("line", "measured", True),
        ("level", "predicted", has_levels),
        ("plan", "n: plan of generation n", "plan" in kinds),
        ("straggler", "▲ a GPU turns slow", "straggler" in kinds),
        ("recovered", "▽ a GPU has recovered", "recovered" in kinds),
        ("injected", "i: a rate is injected, or no more", "injected" in kinds),
    )
    shown = [
        tag("span", tag("span", class_=f"sample {style}"), text, class_="meaning")
        for style, text, is_there in signs
        if is_there
    ]
    return tag("p", *shown, class_="legend")


def _of_points(story: Story) -> Markup | None:
    width = story.iterations_per_point
    if width == 1:
        return None
    return tag(
        "p",
        f"A point is {width} iterations: the line is their median, the band goes from the lowest "
        "to the highest.",
        class_="note",
    )
