"""Heat maps of an analysis as one SVG picture, which any browser shows."""

import math
from collections.abc import Sequence
from textwrap import wrap

import numpy as np

from malleus_megatron.pages.markup import Markup, document, tag
from malleus_megatron.whatif.analysis import Analysis
from malleus_megatron.whatif.rows import Floats

WIDTH = 960
LEFT, TOP = 110, 96
CELL_HEIGHT = 22
MOST_LETTERS = 140
"""Of a line of the sentence above the maps."""
MOST_ROWS = 64
"""A taller map shows the rows with the highest values only."""
MOST_COLUMNS = 240
COOL, WARM = (247, 247, 247), (178, 24, 43)
HOTTEST = 2.0
"""Values from here on have the warmest colour; 1 and below has the coolest."""
DARK = 1.6
"""Above, figures are white."""


def to_svg(analysis: Analysis) -> str:
    """Two maps: slowdown of each worker (stage x dp), and rate of each worker in each step."""
    trace = analysis.what_if.trace
    stages, pipelines = range(trace.num_stages), range(trace.num_pipelines)
    rates = analysis.rates.transpose(2, 0, 1).reshape(-1, len(trace.steps))
    names = [f"dp {dp_rank}, stage {stage}" for dp_rank in pipelines for stage in stages]
    first, height = _map(
        TOP,
        f"slowdown by each worker alone (all together {analysis.what_if.slowdown:.3f})",
        analysis.by_worker,
        [f"stage {stage}" for stage in stages],
        [f"dp {dp_rank}" for dp_rank in pipelines],
    )
    second, total = _map(
        TOP + height + 60,
        "rate of each worker's compute in each step, against its stage in other pipelines",
        rates,
        names,
        [str(step) for step in trace.steps],
    )
    height = TOP + height + 60 + total + 24
    ground = tag("rect", width=WIDTH, height=height, fill="white")
    parts = [ground, *_sentence(analysis.diagnosis), *first, *second]
    return document(WIDTH, height, parts, font_family="sans-serif", font_size=11)


def _sentence(text: str) -> list[Markup]:
    return [
        tag("text", words, x=12, y=24 + 16 * line, font_weight="bold")
        for line, words in enumerate(wrap(text, MOST_LETTERS)[:3])
    ]


def _map(
    top: int, title: str, values: Floats, rows: Sequence[str], columns: Sequence[str]
) -> tuple[list[Markup], int]:
    """SVG elements of one map and its height.

    Args:
        top: Where it begins.
        title: Above it.
        values: [row, column].
        rows: Their names.
        columns: Their names.
    """
    values, columns = _narrowed(values, columns)
    shown = sorted(np.argsort(-values.max(axis=1), kind="stable")[:MOST_ROWS])
    if len(shown) < len(rows):
        title += f"; the {len(shown)} highest of {len(rows)}"
    width = (WIDTH - LEFT - 20) / len(columns)
    parts = [tag("text", title, x=LEFT, y=top - 8)]
    for place, row in enumerate(shown):
        y = top + place * CELL_HEIGHT
        parts.append(tag("text", rows[row], x=LEFT - 8, y=y + 15, text_anchor="end"))
        for column, value in enumerate(values[row]):
            x = LEFT + column * width
            what = tag("title", f"{rows[row]}, {columns[column]}: {value:.3f}")
            cell = {"x": x, "y": y, "width": width, "height": CELL_HEIGHT}
            parts.append(tag("rect", what, **cell, fill=_colour(value), stroke="white"))
            if width >= 34:
                ink = "white" if value > DARK else "black"
                parts.append(_centred(f"{value:.2f}", x + width / 2, y + 15, fill=ink))
    bottom = len(shown) * CELL_HEIGHT
    every = max(1, int(46 // width))
    for column in range(0, len(columns), every):
        x = LEFT + (column + 0.5) * width
        parts.append(_centred(columns[column], x, top + bottom + 14))
    return parts, bottom + 16


def _centred(text: str, x: float, y: int, **attributes: str) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor="middle", **attributes)


def _narrowed(values: Floats, columns: Sequence[str]) -> tuple[Floats, Sequence[str]]:
    """Of too many columns neighbours become one, with the highest value and the first name."""
    per_cell = math.ceil(len(columns) / MOST_COLUMNS)
    if per_cell <= 1:
        return values, columns
    starts = range(0, len(columns), per_cell)
    return np.maximum.reduceat(values, starts, axis=1), [columns[start] for start in starts]


def _colour(value: float) -> str:
    warmth = min(max((value - 1) / (HOTTEST - 1), 0.0), 1.0)
    parts = (round(cool + warmth * (warm - cool)) for cool, warm in zip(COOL, WARM, strict=True))
    return "#" + "".join(f"{part:02x}" for part in parts)
