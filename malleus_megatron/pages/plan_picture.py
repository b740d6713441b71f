"""A plan as a picture: stages as wide as their layers, GPUs in the colours of their rates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from malleus_megatron.pages.markup import Markup, join, tag
from malleus_megatron.pages.rate_map import swatch
from malleus_megatron.pages.scales import rate_class, short
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.plan.render import gpu_ranges

_MANY = 8
"""Of more pipelines, alike ones are drawn once."""
_MOST_DRAWN = 24
_MOST_STANDBY = 64
_MOST_LETTERS = 16
"""Of pipelines' numbers in a line that must fit on a phone."""
_LABEL, _BOX, _CELL, _BAR, _GAP = 18, 46, 9, 5, 16
_HEALTHY = frozenset({"r0", "unknown"})
_LETTER = 7.2
"""Pixels of one, about, in the pictures' text."""
_WIDE, _NARROW = 900, 320
"""Pixels of a picture on a desk and on a phone, about."""

type Rates = Mapping[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A pipeline, or one of several that are alike."""

    numbers: tuple[int, ...]
    pipeline: Pipeline


def draw_plan(plan: Plan, rates: Rates) -> Markup:
    """The pipelines, those on standby, and a line about what is left out.

    Args:
        plan: The plan.
        rates: Of its GPUs; None where it is not known.
    """
    rows = _rows(plan, rates)
    drawn, more = rows[:_MOST_DRAWN], rows[_MOST_DRAWN:]
    most = max(pipeline.num_microbatches for pipeline in plan.pipelines)
    each = _LABEL + _BOX + _BAR + _GAP
    svg = tag(
        "svg",
        *(
            part
            for number, row in enumerate(drawn)
            for part in _drawn(row, rates, number * each, most)
        ),
        class_="pipelines",
        height=each * len(drawn),
        role="img",
        aria_label=_what(plan),
    )
    return join(
        [
            tag("figure", svg, class_="picture"),
            tag("p", f"{sum(len(row.numbers) for row in more)} more pipelines.", class_="note")
            if more
            else None,
            _standby(plan, rates),
        ]
    )


def _rows(plan: Plan, rates: Rates) -> list[_Row]:
    """Pipelines with a GPU that stands out first, where there are too many to draw all."""
    pipelines = list(enumerate(plan.pipelines))
    if len(pipelines) <= _MANY:
        return [_Row(numbers=(number,), pipeline=pipeline) for number, pipeline in pipelines]
    alone = [
        _Row(numbers=(number,), pipeline=pipeline)
        for number, pipeline in pipelines
        if any(rate_class(rates.get(gpu)) not in _HEALTHY for gpu in pipeline.gpus)
    ]
    shown = {row.numbers[0] for row in alone}
    alike: dict[object, list[int]] = {}
    for number, pipeline in pipelines:
        if number not in shown:
            shape = [(len(stage.gpus), stage.num_layers) for stage in pipeline.stages]
            alike.setdefault((pipeline.num_microbatches, tuple(shape)), []).append(number)
    return alone + [
        _Row(numbers=tuple(numbers), pipeline=plan.pipelines[numbers[0]])
        for numbers in alike.values()
    ]


def _drawn(row: _Row, rates: Rates, top: int, most: int) -> Iterator[Markup]:
    pipeline, alike = row.pipeline, len(row.numbers)
    count = pipeline.num_microbatches
    share = f"{count} micro-batch{'es' if count != 1 else ''}"
    if alike > 1:
        which = f" ({gpu_ranges(row.numbers)})"
        which = which if len(which) <= _MOST_LETTERS else ""
        label = f"{alike} pipelines alike{which}, {share} each"
    else:
        label = f"pipeline {row.numbers[0]}, {share}"
    yield tag("text", label, x=0, y=top + 12, class_="start name")
    for number, stage in enumerate(pipeline.stages):
        yield _stage(stage, number, rates, pipeline.num_layers, top + _LABEL, named=alike == 1)
    y = top + _LABEL + _BOX + 3
    bar = tag("title", f"{share} of at most {most}")
    yield tag("rect", x=0, y=y, width="100%", height=_BAR, class_="room")
    yield tag(
        "rect", bar, x=0, y=y, width=f"{100 * count / most:.2f}%", height=_BAR, class_="batches"
    )


def _stage(
    stage: Stage, number: int, rates: Rates, layers: int, top: int, *, named: bool
) -> Markup:
    """A box with its GPUs along its lower edge; text as far as there is room for it."""
    width = 100 * stage.num_layers / layers
    gpus = f"GPU {gpu_ranges(stage.gpus)}" if named else f"TP {len(stage.gpus)}"
    text = f"{stage.num_layers} layer{'s' if stage.num_layers != 1 else ''}"
    cells = len(stage.gpus)
    slow = [gpu for gpu in stage.gpus if rate_class(rates.get(gpu)) not in _HEALTHY]
    told = "".join(f", GPU {gpu} at rate {short(rates.get(gpu), 3)}" for gpu in slow[:8])
    return tag(
        "svg",
        tag("title", f"stage {number}: {gpus}, layers {_range(stage)} ({stage.num_layers}){told}"),
        tag("rect", x=0, y=0, width="100%", height=_BOX, class_="stage"),
        *(
            tag(
                "rect",
                x=f"{100 * place / cells:.2f}%",
                y=_BOX - _CELL,
                width=f"{100 / cells:.2f}%",
                height=_CELL,
                class_=f"cell {rate_class(rates.get(gpu))}",
            )
            for place, gpu in enumerate(stage.gpus)
        ),
        *_words(gpus, gpus.partition(" ")[2], width, 16),
        *_words(text, str(stage.num_layers), width, 31),
        tag("rect", x=0, y=0, width="100%", height=_BOX, class_="edge"),
        x=f"{100 * stage.layers[0] / layers:.2f}%",
        y=top,
        width=f"{width:.2f}%",
        height=_BOX,
    )


def _words(long: str, brief: str, width: float, y: int) -> Iterator[Markup]:
    """The longest text that fits on a desk, and the one that fits on a phone."""
    for style, pixels in (("wide", _WIDE), ("narrow", _NARROW)):
        room = pixels * width / 100 - 4
        text = next((text for text in (long, brief) if len(text) * _LETTER <= room), None)
        if text is not None:
            yield tag("text", text, x="50%", y=y, class_=f"middle {style}")


def _range(stage: Stage) -> str:
    start, end = stage.layers
    return f"{start} to {end - 1}" if end > start else "none"


def _standby(plan: Plan, rates: Rates) -> Markup | None:
    if not plan.standby:
        return None
    shown: Sequence[int] = plan.standby[:_MOST_STANDBY]
    more = len(plan.standby) - len(shown)
    names = [
        tag("li", swatch(rates.get(gpu)), f"GPU {gpu}", _rate_of(rates.get(gpu))) for gpu in shown
    ]
    return join(
        [
            tag("p", f"On standby: {len(plan.standby)}", class_="name"),
            tag("ul", *names, tag("li", f"{more} more") if more else None, class_="gpus"),
        ]
    )


def _rate_of(rate: float | None) -> str:
    return "" if rate is None else f", rate {short(rate, 3)}"


def _what(plan: Plan) -> str:
    in_use = sum(len(pipeline.gpus) for pipeline in plan.pipelines)
    return (
        f"{len(plan.pipelines)} pipelines, {plan.num_layers} layers, {plan.num_microbatches} "
        f"micro-batches, {in_use} GPUs in use, {len(plan.standby)} on standby. The table of "
        "generations has the plan as text."
    )
