"""What a job has said of itself, event by event; of a job without an end only the latest is kept.

The lines of events.jsonl and what a job sends to its sidecar are the same events, so the report
and the status page show the same things.
"""

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import rates_from_json
from malleus_megatron.plan.fields import as_dict, as_int, required, to_float
from malleus_megatron.plan.rates import Rates

_MOST_GPUS = 2**20
"""A larger number is a mistake, and would take a row of that length."""


_LAST = 10**12
"""Beyond it a picture's coordinates are no numbers any more."""
_MOST = 1e30
"""Nothing that is measured is more; sums and differences stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration. What was not told is None; a loss may be infinite or NaN."""

    iteration: int
    step_time_s: float | None
    loss: float | None
    generation: int
    plan_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RatesSince:
    """The rates that hold from an iteration on; NaN for a GPU that was not measured."""

    iteration: int
    by_gpu: array[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything else that was said, as it was said."""

    kind: str
    iteration: int
    values: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """The field as a number, infinite if the text says so; None: there is none."""
        return number(self.values.get(name))

    def text(self, name: str) -> str:
        """The field as text; empty: there is none."""
        value = self.values.get(name)
        return "" if value is None else str(value)

    def integer(self, name: str) -> int | None:
        """The field as a whole number from 0; None: there is none that makes sense."""
        return whole_number(self.values.get(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is kept; the oldest goes first."""

    steps: int | None = None
    events: int | None = None
    rates: int | None = None
    """Single rates: GPUs times changes."""


class History:
    """One run of a job, from its start or from an iteration on."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        """Nothing has happened yet; without bounds all is kept."""
        bounds = bounds or Bounds()
        self.steps: deque[Step] = deque(maxlen=bounds.steps)
        self.rates: deque[RatesSince] = deque()
        self.events: deque[Event] = deque(maxlen=bounds.events)
        self.memory: Event | None = None
        """The last measurement of memory, also when later events have taken its place."""
        self.num_iterations = 0
        """All that were told, also those that are not kept."""
        self.last_iteration = 0
        self.version = 0
        """Counts what was added: a page of the same version is the same page."""
        self._most_rates = bounds.rates
        self._num_rates = 0

    def add(self, body: Mapping[str, Any]) -> None:
        """Take in one event. An unknown kind is kept as it is.

        Raises:
            BadInputError: it names no kind or no iteration, or its rates or its time are none.
        """
        kind = str(required(dict(body), "event", "event"))
        iteration = as_int(required(dict(body), "iteration", kind), f"{kind}.iteration")
        if whole_number(iteration) is None:
            raise BadInputError(f"{kind}: iteration {iteration} is not from 0 to {_LAST}.")
        if kind == "iteration":
            self._add_step(iteration, body)
        elif kind == "rates":
            rates = as_dict(required(dict(body), "rates", kind), "rates.rates")
            self.add_rates(iteration, rates_from_json(rates))
        else:
            values = {key: value for key, value in body.items() if key not in _OF_ALL}
            self._add_event(Event(kind=kind, iteration=iteration, values=values))
        self.version += 1

    def add_rates(self, iteration: int, rates: Rates) -> None:
        """Take in what was measured.

        Raises:
            BadInputError: a GPU's number is beyond all jobs.
        """
        if not rates.by_gpu:
            return
        highest = rates.by_gpu[-1][0]
        if highest >= _MOST_GPUS:
            raise BadInputError(f"rates: GPU {highest}; at most {_MOST_GPUS} are shown.")
        row = array("d", [math.nan]) * (highest + 1)
        for gpu, rate in rates:
            row[gpu] = rate
        self.rates.append(RatesSince(iteration=iteration, by_gpu=row))
        self._num_rates += len(row)
        while self._most_rates is not None and self._num_rates > max(self._most_rates, len(row)):
            self._num_rates -= len(self.rates.popleft().by_gpu)
        self.version += 1

    @property
    def num_gpus(self) -> int:
        """As many as were ever named."""
        rated = max((len(rates.by_gpu) for rates in self.rates), default=0)
        told = (event.integer("gpus") or 0 for event in self.events if event.kind == "level")
        return max(rated, *told, 0)

    def rate_at(self, gpu: int, iteration: int | None = None) -> float | None:
        """The rate that held in an iteration (the last one told); None: not known."""
        for rates in reversed(self.rates):
            if iteration is None or rates.iteration <= iteration:
                known = gpu < len(rates.by_gpu) and not math.isnan(rates.by_gpu[gpu])
                return rates.by_gpu[gpu] if known else None
        return None

    def of_kind(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in their order."""
        return [event for event in self.events if event.kind in kinds]

    def _add_event(self, event: Event) -> None:
        if event.kind == "memory":
            if self.events.maxlen is not None and self.memory is not None:
                self._leave_out(self.memory)
            self.memory = event
        self.events.append(event)

    def _leave_out(self, event: Event) -> None:
        """Memory is two numbers a GPU: of a job of months only the latest is worth its room."""
        where = next((at for at, one in enumerate(self.events) if one is event), None)
        if where is not None:
            del self.events[where]

    def _add_step(self, iteration: int, body: Mapping[str, Any]) -> None:
        if self.steps and iteration <= self.steps[-1].iteration:
            raise BadInputError(f"Iteration {iteration} after {self.steps[-1].iteration}.")
        step_time_s = number(body.get("step_time_s"))
        if step_time_s is not None and not 0 <= step_time_s < math.inf:
            raise BadInputError(f"iteration: step_time_s {step_time_s} is no time.")
        self.steps.append(
            Step(
                iteration=iteration,
                step_time_s=step_time_s,
                loss=number(body.get("loss")),
                generation=whole_number(body.get("generation")) or 0,
                plan_id=str(body.get("plan", "")),
            )
        )
        self.num_iterations += 1
        self.last_iteration = iteration


def begins_a_run(body: Mapping[str, Any], before: History) -> bool:
    """True if the event is of another run than what was told before: a job that starts again."""
    kind, iteration = body.get("event"), body.get("iteration")
    if kind == "level":
        return iteration == 0
    return kind == "iteration" and isinstance(iteration, int) and iteration <= before.last_iteration


_OF_ALL = frozenset({"event", "iteration"})


def number(value: object) -> float | None:
    """A JSON number, or one of the words that stand for those that JSON has not.

    None: it is neither, or beyond all that can be measured.
    """
    if value in ("inf", "-inf", "nan"):
        return float(str(value))
    found = to_float(value)
    is_measure = found is not None and (not math.isfinite(found) or abs(found) <= _MOST)
    return found if is_measure else None


def whole_number(value: object) -> int | None:
    """A JSON number from 0 that counts something; None: it is no such number."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LAST
    return value if is_count and isinstance(value, int) else None
