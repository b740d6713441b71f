"""Step time over the trace as one SVG document, without anything from outside."""

import math
from collections.abc import Iterator, Sequence

from malleus_megatron.pages.markup import Markup, document, tag
from malleus_megatron.pages.scales import COLOURS, factor_scale, iteration_ticks
from malleus_megatron.simulator.policies import BOUND, CAPACITY, Simulation
from malleus_megatron.simulator.replay import Run, Span

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 150, 56, 48
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-size:15px}.grid{stroke:#ddd}"
    ".line{fill:none;stroke-width:2}.known{stroke-dasharray:5 4}.end{text-anchor:end}"
    ".middle{text-anchor:middle}"
)


def svg(simulation: Simulation, title: str) -> str:
    """One line a policy, the first on top; a pause before an iteration is a triangle above."""
    steps = [span.step_time_s - span.pause_s for run in simulation.runs for span in run.spans]
    axes = _Axes(simulation.num_iterations, factor_scale(min(steps), max(steps)))
    parts = [
        tag("style", Markup(_STYLE)),
        tag("rect", width=_WIDTH, height=_HEIGHT, fill="#fff"),
        tag("text", title, class_="title", x=_LEFT, y=24),
        *axes.draw(),
    ]
    for number, run in reversed(list(enumerate(simulation.runs))):
        parts += _policy(run, number, axes)
    return document(_WIDTH, _HEIGHT, parts, role="img", aria_label=title)


class _Axes:
    """Iterations to the right; seconds upwards, each factor of the same height."""

    def __init__(self, num_iterations: int, scale_s: Sequence[float]) -> None:
        self._num_iterations = num_iterations
        self._scale_s = scale_s
        self._width = _WIDTH - _LEFT - _RIGHT
        self._height = _HEIGHT - _TOP - _BOTTOM

    def x(self, iteration: int) -> str:
        """The left end of an iteration."""
        return f"{_LEFT + self._width * (iteration - 1) / self._num_iterations:.2f}"

    def y(self, time_s: float) -> str:
        """The height of a step time."""
        lowest_s, highest_s = self._scale_s[0], self._scale_s[-1]
        part = math.log(highest_s / time_s) / math.log(highest_s / lowest_s)
        return f"{_TOP + self._height * part:.2f}"

    def draw(self) -> Iterator[Markup]:
        """Grid lines with numbers, and what the axes are."""
        bottom, right = _TOP + self._height, _LEFT + self._width
        for time_s in self._scale_s:
            y = self.y(time_s)
            yield tag("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y)
            yield tag("text", f"{time_s:g}", class_="end", x=_LEFT - 8, y=y, dy=4)
        for iteration in iteration_ticks(1, self._num_iterations):
            x = self.x(iteration)
            yield tag("text", str(iteration), class_="middle", x=x, y=bottom + 18)
        middle = _LEFT + self._width / 2
        yield tag("text", "iteration", class_="middle", x=f"{middle:.0f}", y=bottom + 38)
        yield tag("text", "step time, s", x=8, y=_TOP - 14)


def _policy(run: Run, number: int, axes: _Axes) -> Iterator[Markup]:
    colour = COLOURS[number % len(COLOURS)]
    kind = "line known" if run.policy in {BOUND, CAPACITY} else "line"
    yield tag("path", class_=kind, stroke=colour, d=_path(run.spans, axes))
    for span in run.spans:
        if span.pause_s:
            x = float(axes.x(span.from_iteration))
            pause = f"{run.policy}: {span.pause_s:.4g} s before iteration {span.from_iteration}"
            triangle = f"M{x - 5:.2f} {_TOP + 2}h10l-5 9z"
            yield tag("path", tag("title", pause), fill=colour, d=triangle)
    y = _TOP + 12 + 20 * number
    x = _WIDTH - _RIGHT + 14
    yield tag("line", class_=kind, stroke=colour, x1=x, x2=x + 24, y1=y, y2=y)
    yield tag("text", run.policy, x=x + 32, y=y, dy=4)


def _path(spans: Sequence[Span], axes: _Axes) -> str:
    points = []
    for span in spans:
        y = axes.y(span.step_time_s - span.pause_s)
        points += [f"{axes.x(span.from_iteration)} {y}", f"{axes.x(span.to_iteration)} {y}"]
    return "M" + "L".join(points)
