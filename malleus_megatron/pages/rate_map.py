"""Rates over time: a row for each GPU or group of GPUs, a colour for each rate."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from malleus_megatron.pages.chart import draw_iterations
from malleus_megatron.pages.markup import Markup, join, tag
from malleus_megatron.pages.rate_table import RateRow, RateTable
from malleus_megatron.pages.scales import rate_class, rate_legend, short

_ROW = 18
_LOW_ROW = 13
_MANY_ROWS = 20


def draw_rates(table: RateTable) -> Markup:
    """The map, or two of them: the slowest GPUs, and all in groups; and the meaning of colours."""
    num_spans = table.end - table.starts[0]
    many = "GPUs that stood out" if table.rows else None
    size = len(table.groups[0].gpus) if table.groups else 0
    return join(
        [
            _map(table, table.rows, many if table.groups else None),
            _map(table, table.groups, f"All GPUs: the slowest of each {size}"),
            tag(
                "p",
                *(_meaning(style, text) for style, text in rate_legend()),
                class_="legend",
            ),
            tag(
                "p",
                "1 is healthy; a GPU of rate 2 takes twice as long for the same work. "
                + _of_spans(num_spans, len(table.starts)),
                class_="note",
            ),
        ]
    )


def swatch(rate: float | None) -> Markup:
    """A small square in a rate's colour."""
    return tag("span", class_=f"swatch {rate_class(rate)}")


def _of_spans(num_iterations: int, num_spans: int) -> str:
    if num_spans == num_iterations:
        return "One column is one iteration."
    return f"One column is {-(-num_iterations // num_spans)} iterations: the highest rate in them."


def _meaning(style: str, text: str) -> Markup:
    return tag("span", tag("span", class_=f"swatch {style}"), text, class_="meaning")


def _map(table: RateTable, rows: Sequence[RateRow], caption: str | None) -> Markup:
    if not rows:
        return Markup("")
    row_height = _ROW if len(rows) <= _MANY_ROWS else _LOW_ROW
    height = row_height * len(rows)
    first, last = table.starts[0], table.end - 1
    cells = tag(
        "svg",
        *(cell for number, row in enumerate(rows) for cell in _cells(table, row, number)),
        viewBox=f"0 0 {table.end - first} {len(rows)}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )
    svg = tag(
        "svg",
        cells,
        *(
            tag("text", row.name, x=-8, y=row_height * (number + 0.5), dy=4, class_="end")
            for number, row in enumerate(rows)
        ),
        *draw_iterations(first, last, height + 16),
        class_="chart rates",
        height=height,
        role="img",
        aria_label=_what(rows, first, last),
    )
    return tag("figure", tag("figcaption", caption) if caption else None, svg, class_="plot map")


def _cells(table: RateTable, row: RateRow, number: int) -> Iterator[Markup]:
    """Neighbours of the same colour are one cell."""
    first = table.starts[0]
    spans = list(zip(table.starts, [*table.starts[1:], table.end], row.rates, strict=True))
    for style, run in groupby(spans, key=lambda span: rate_class(span[2])):
        same = list(run)
        start, end = same[0][0], same[-1][1]
        known = [rate for _, _, rate in same if rate is not None]
        rates = "not measured"
        if known:
            low, high = short(min(known), 3), short(max(known), 3)
            rates = f"rate {low}" if low == high else f"rate {low} to {high}"
        yield tag(
            "rect",
            tag("title", f"{row.name}, {_span(start, end)}: {rates}"),
            x=start - first,
            y=number,
            width=end - start,
            height=1,
            class_=style,
        )


def _span(start: int, end: int) -> str:
    last = end - 1
    return f"iteration {start}" if last == start else f"iterations {start} to {last}"


def _what(rows: Sequence[RateRow], first: int, last: int) -> str:
    peaks = {
        row.name: max((rate for rate in row.rates if rate is not None), default=1.0) for row in rows
    }
    highest = max(peaks, key=lambda name: peaks[name])
    return (
        f"Rates of {len(rows)} rows over iterations {first} to {last}; the highest is "
        f"{short(peaks[highest], 3)}, {highest}."
    )
