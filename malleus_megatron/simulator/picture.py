"""Step time over the trace as one SVG document, without anything from outside."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from malleus_megatron.simulator.policies import BOUND, CAPACITY, Simulation
from malleus_megatron.simulator.replay import Run, Span

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 150, 56, 48
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#666666")
"""Told apart also by eyes that do not tell red from green."""
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-size:15px}.grid{stroke:#ddd}"
    ".line{fill:none;stroke-width:2}.known{stroke-dasharray:5 4}.end{text-anchor:end}"
    ".middle{text-anchor:middle}"
)


def svg(simulation: Simulation, title: str) -> str:
    """One line a policy, the first on top; a pause before an iteration is a triangle above."""
    steps = [span.step_time_s - span.pause_s for run in simulation.runs for span in run.spans]
    axes = _Axes(simulation.num_iterations, _round_scale(min(steps), max(steps)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
        *axes.draw(),
    ]
    for number, run in reversed(list(enumerate(simulation.runs))):
        parts += _policy(run, number, axes)
    return "\n".join([*parts, "</svg>"]) + "\n"


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

    def draw(self) -> Iterator[str]:
        """Grid lines with numbers, and what the axes are."""
        bottom, right = _TOP + self._height, _LEFT + self._width
        for time_s in self._scale_s:
            y = self.y(time_s)
            yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
            yield f'<text class="end" x="{_LEFT - 8}" y="{y}" dy="4">{time_s:g}</text>'
        for iteration in _ticks(self._num_iterations):
            yield (
                f'<text class="middle" x="{self.x(iteration)}" y="{bottom + 18}">{iteration}</text>'
            )
        middle = _LEFT + self._width / 2
        yield f'<text class="middle" x="{middle:.0f}" y="{bottom + 38}">iteration</text>'
        yield f'<text x="8" y="{_TOP - 14}">step time, s</text>'


def _round_scale(lowest: float, highest: float) -> list[float]:
    """The numbers 1, 2, 5 and their powers of ten from below the lowest to above the highest."""
    start = math.floor(math.log10(lowest)) - 1
    powers = range(start, math.ceil(math.log10(highest)) + 2)
    numbers = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(index for index, number in enumerate(numbers) if number <= lowest)
    last = min(index for index, number in enumerate(numbers) if number > highest)
    return numbers[first : last + 1]


def _ticks(num_iterations: int) -> list[int]:
    """The first iteration, and a few round ones."""
    rough = max(1.0, num_iterations / 5)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return (
        [1, *range(step, num_iterations + 1, step)] if step > 1 else [*range(1, num_iterations + 1)]
    )


def _policy(run: Run, number: int, axes: _Axes) -> Iterator[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    kind = "line known" if run.policy in {BOUND, CAPACITY} else "line"
    yield f'<path class="{kind}" stroke="{colour}" d="{_path(run.spans, axes)}"/>'
    for span in run.spans:
        if span.pause_s:
            x = float(axes.x(span.from_iteration))
            top = _TOP + 2
            yield (
                f'<path fill="{colour}" d="M{x - 5:.2f} {top}h10l-5 9z"><title>'
                f"{escape(run.policy)}: {span.pause_s:.4g} s before iteration "
                f"{span.from_iteration}</title></path>"
            )
    y = _TOP + 12 + 20 * number
    x = _WIDTH - _RIGHT + 14
    yield f'<line class="{kind}" stroke="{colour}" x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}"/>'
    yield f'<text x="{x + 32}" y="{y}" dy="4">{escape(run.policy)}</text>'


def _path(spans: Sequence[Span], axes: _Axes) -> str:
    points = []
    for span in spans:
        y = axes.y(span.step_time_s - span.pause_s)
        points += [f"{axes.x(span.from_iteration)} {y}", f"{axes.x(span.to_iteration)} {y}"]
    return "M" + "L".join(points)
