"""A value over iterations: a line, the band around it, and what happened meanwhile.

Everything is placed in percent of the width and the text is of fixed size, so that the same
picture can be read on a wall and on a phone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from malleus_megatron.pages.bands import Band
from malleus_megatron.pages.markup import Markup, join, tag
from malleus_megatron.pages.scales import iteration_ticks, round_scale, short, tick_texts
from malleus_megatron.pages.story import Mark

HEIGHT = 210
_FINE = 1000
"""Units of a path's own coordinates, in both directions."""
_LEAST_BETWEEN_LABELS = 0.05
_CLIPPED_FROM = 1.6
"""The highest point is cut off where it is so many times what nearly all points are below."""
_NEARLY_ALL = 0.98
_MOST_NAMED = 6
_LABEL_HEIGHTS = {"plan": -18, "straggler": -5, "recovered": -5, "injected": -31}


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A value that holds over a span of iterations, both ends included."""

    first: int
    last: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn."""

    title: str
    what: str
    """The picture in one sentence, for those who do not see it."""
    first: int
    last: int
    points: tuple[Band, ...]
    iterations_per_point: int
    levels: tuple[Level, ...] = ()
    marks: tuple[Mark, ...] = ()
    from_zero: bool = False


def draw_chart(chart: Chart) -> Markup:
    """The picture, and a line about points beyond its upper edge."""
    scale, num_clipped = _scale(chart)
    axes = _Axes(chart.first, chart.last, scale)
    svg = tag(
        "svg",
        *axes.draw(),
        *_marks(chart.marks, axes),
        tag(
            "svg",
            *_series(chart, axes),
            viewBox=f"0 0 {_FINE} {_FINE}",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
        ),
        class_="chart",
        height=HEIGHT,
        role="img",
        aria_label=chart.what,
    )
    clipped = None
    if num_clipped:
        highest = max(point.highest for point in chart.points)
        clipped = tag(
            "p",
            f"{num_clipped} of {len(chart.points)} points go beyond the upper edge, up to "
            f"{short(highest)}.",
            class_="note",
        )
    return join([tag("figure", tag("figcaption", chart.title), svg, class_="plot"), clipped])


class _Axes:
    """Iterations to the right, values upwards."""

    def __init__(self, first: int, last: int, scale: Sequence[float]) -> None:
        self.first, self.last = first, last
        self._scale = scale

    def part(self, iteration: float) -> float:
        """Where an iteration's middle is, from 0 to 1."""
        return (iteration - self.first + 0.5) / (self.last - self.first + 1)

    def height(self, value: float) -> float:
        """Where a value is, from 0 (top) to 1, held inside."""
        low, high = self._scale[0], self._scale[-1]
        return min(1.0, max(0.0, (high - value) / (high - low)))

    def fine(self, iteration: float, value: float) -> str:
        """A point of a path."""
        return f"{_FINE * self.part(iteration):.1f} {_FINE * self.height(value):.1f}"

    def draw(self) -> Iterator[Markup]:
        """Grid lines and their numbers."""
        for value, text in zip(self._scale, tick_texts(self._scale), strict=True):
            y = HEIGHT * self.height(value)
            yield tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
            yield tag("text", text, x=-8, y=y, dy=4, class_="end")
        yield from draw_iterations(self.first, self.last, HEIGHT + 18)


def draw_iterations(first: int, last: int, y: int) -> Iterator[Markup]:
    """Numbers of iterations along the lower edge; on a phone every other one."""
    for place, tick in enumerate(iteration_ticks(first, last)):
        x = 100 * (tick - first + 0.5) / (last - first + 1)
        ends = "end" if x > 94 else "start" if x < 6 else "middle"
        style = f"{ends} wide" if place % 2 else ends
        yield tag("text", str(tick), x=f"{x:.2f}%", y=y, class_=style)


def _scale(chart: Chart) -> tuple[list[float], int]:
    """Numbers of the axis, and how many points are beyond it."""
    if not chart.points:
        return [0.0, 1.0], 0
    tops = sorted(point.highest for point in chart.points)
    levels = [level.value for level in chart.levels]
    usual = max([tops[int(_NEARLY_ALL * (len(tops) - 1))], *levels])
    highest = tops[-1] if tops[-1] <= _CLIPPED_FROM * usual else usual
    highest = max([highest, *levels])
    lowest = 0.0 if chart.from_zero else min(point.lowest for point in chart.points)
    scale = round_scale(lowest, max(lowest, highest))
    return scale, sum(top > scale[-1] for top in tops)


def _series(chart: Chart, axes: _Axes) -> Iterator[Markup]:
    for run in _unbroken(chart.points, chart.iterations_per_point):
        if any(point.num_values > 1 for point in run):
            above = [axes.fine(_middle(point), point.highest) for point in run]
            below = [axes.fine(_middle(point), point.lowest) for point in reversed(run)]
            yield tag("path", d="M" + "L".join([*above, *below]) + "Z", class_="band")
        line = [axes.fine(_middle(point), point.middle) for point in run]
        # A line to where it is draws a dot, if it has round ends: a lone point is seen too.
        yield tag("path", d="M" + "L".join(line if len(line) > 1 else line * 2), class_="line")
    for level in chart.levels:
        ends = [axes.fine(level.first - 0.5, level.value), axes.fine(level.last + 0.5, level.value)]
        yield tag("path", d="M" + "L".join(ends), class_="level")


def _unbroken(points: Sequence[Band], width: int) -> Iterator[list[Band]]:
    """Runs of points without a missing one between them."""
    run: list[Band] = []
    for point in points:
        if run and point.first - run[-1].last > 2 * width:
            yield run
            run = []
        run.append(point)
    if run:
        yield run


def _middle(point: Band) -> float:
    return (point.first + point.last) / 2


def _marks(marks: Iterable[Mark], axes: _Axes) -> Iterator[Markup]:
    """A line for each kind and iteration; labels only where there is room for them."""
    labelled = dict.fromkeys(_LABEL_HEIGHTS.values(), -1.0)
    key: Callable[[Mark], tuple[int, str]] = lambda mark: (mark.iteration, mark.kind)  # noqa: E731
    shown = [mark for mark in marks if axes.first <= mark.iteration <= axes.last + 1]
    for (iteration, kind), same in groupby(sorted(shown, key=key), key=key):
        group = list(same)
        # What holds from an iteration on begins left of it.
        part = min(1.0, max(0.0, axes.part(iteration - 0.5)))
        x = f"{100 * part:.2f}%"
        title = tag("title", _named(iteration, group))
        line = tag("line", x1=x, x2=x, y1=0, y2="100%", class_=f"mark {kind}")
        hit = tag("rect", x=x, y=-30, width=9, height=HEIGHT + 30, class_="hit")
        y = _LABEL_HEIGHTS[kind]
        label = None
        if part - labelled[y] >= _LEAST_BETWEEN_LABELS:
            labelled[y] = part
            label = tag("text", group[0].label, x=x, y=y, class_=f"middle glyph {kind}")
        yield tag("g", title, line, label, hit)


def _named(iteration: int, group: Sequence[Mark]) -> str:
    more = len(group) - _MOST_NAMED
    lines = [mark.what for mark in group[:_MOST_NAMED]] + ([f"{more} more"] if more > 0 else [])
    return f"iteration {iteration}: " + "; ".join(lines)
