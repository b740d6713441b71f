"""What a run comes to: its generations, its stragglers, its migrations."""

import math
from dataclasses import dataclass
from statistics import median

from malleus_megatron.pages.history import Event, History, Step, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Consecutive iterations under one plan. Times are of its iterations; None where not told."""

    generation: int
    first: int
    last: int
    """Before `first` if no iteration has ended under it yet."""
    plan_id: str
    layout: str
    """The plan in short; empty where it was not told."""
    num_iterations: int
    median_s: float | None
    lowest_s: float | None
    highest_s: float | None
    predicted_s: float | None
    planning_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One GPU from the iteration in which it stood out until it recovered."""

    gpu: int
    rate: float | None
    """When it was named."""
    peak_rate: float | None
    since: int
    named: int
    recovered: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One migration."""

    iteration: int
    generation: int | None
    num_bytes: float | None
    seconds: float | None
    predicted_s: float | None
    peak_extra_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a step took on every GPU, when it was last measured."""

    iteration: int
    generation: int | None
    measured_mib: tuple[float | None, ...]
    predicted_mib: tuple[float | None, ...]
    usable_mib: float | None


def phases(history: History) -> tuple[Phase, ...]:
    """The run cut where its plan changes."""
    runs: list[list[Step]] = []
    for step in history.steps:
        if not runs or runs[-1][-1].generation != step.generation:
            runs.append([])
        runs[-1].append(step)
    plans = {event.integer("generation"): event for event in history.of_kind("plan")}
    nominal = next((event for event in history.of_kind("level") if event.text("plan")), None)
    found = [_phase(steps, plans.get(steps[0].generation), nominal) for steps in runs]
    last = max(
        plans.values(), key=lambda event: (event.iteration, event.integer("generation") or 0),
        default=None,
    )  # fmt: skip
    if last is not None and (not runs or last.iteration > history.last_iteration):
        found.append(_not_begun(last))
    return tuple(found)


def stragglers(history: History) -> tuple[Straggler, ...]:
    """In the order in which they were named; a GPU that fell back is there twice."""
    found: list[Straggler] = []
    open_events: dict[int, Event] = {}
    for event in history.of_kind("straggler", "recovered"):
        gpu = event.integer("gpu")
        if gpu is None:
            continue
        begun = open_events.pop(gpu, None)
        if begun is not None:
            found.append(_straggler(history, begun, event if event.kind == "recovered" else None))
        if event.kind == "straggler":
            open_events[gpu] = event
    found += [_straggler(history, event, None) for event in open_events.values()]
    return tuple(sorted(found, key=lambda one: (one.named, one.gpu)))


def moves(history: History) -> tuple[Move, ...]:
    """All migrations."""
    return tuple(
        Move(
            iteration=event.iteration,
            generation=event.integer("generation"),
            num_bytes=event.number("bytes"),
            seconds=event.number("seconds"),
            predicted_s=event.number("predicted_seconds"),
            peak_extra_bytes=event.number("peak_extra_bytes"),
        )
        for event in history.of_kind("migration")
    )


def memory(history: History) -> Memory | None:
    """The last measurement, if memory was measured."""
    event = history.memory
    if event is None:
        return None
    return Memory(
        iteration=event.iteration,
        generation=event.integer("generation"),
        measured_mib=_numbers(event.values.get("measured_mib")),
        predicted_mib=_numbers(event.values.get("predicted_mib")),
        usable_mib=event.number("usable_mib"),
    )


def median_step_s(steps: list[Step]) -> float | None:
    """Of those whose time was told."""
    times = _times(steps)
    return median(times) if times else None


def predicted_step_s(plan: Event | None) -> float | None:
    """What a plan's event says of the step under it."""
    predicted = None if plan is None else plan.values.get("predicted")
    return number(predicted.get("step_time_s")) if isinstance(predicted, dict) else None


def _times(steps: list[Step]) -> list[float]:
    times = [step.step_time_s for step in steps]
    return [time_s for time_s in times if time_s is not None and math.isfinite(time_s)]


def _phase(steps: list[Step], plan: Event | None, nominal: Event | None) -> Phase:
    times = _times(steps)
    layout = "" if plan is None else plan.text("layout")
    if nominal is not None and steps[-1].plan_id == nominal.text("plan"):
        layout = nominal.text("layout")
    return Phase(
        generation=steps[0].generation,
        first=steps[0].iteration,
        last=steps[-1].iteration,
        plan_id=steps[-1].plan_id,
        layout=layout,
        num_iterations=len(steps),
        median_s=median(times) if times else None,
        lowest_s=min(times, default=None),
        highest_s=max(times, default=None),
        predicted_s=predicted_step_s(plan),
        planning_s=None if plan is None else plan.number("seconds"),
    )


def _not_begun(plan: Event) -> Phase:
    return Phase(
        generation=plan.integer("generation") or 0,
        first=plan.iteration,
        last=plan.iteration - 1,
        plan_id=plan.text("plan"),
        layout=plan.text("layout"),
        num_iterations=0,
        median_s=None,
        lowest_s=None,
        highest_s=None,
        predicted_s=predicted_step_s(plan),
        planning_s=plan.number("seconds"),
    )


def _straggler(history: History, begun: Event, ended: Event | None) -> Straggler:
    gpu, rate = begun.integer("gpu") or 0, begun.number("rate")
    since = begun.integer("since")
    since = begun.iteration if since is None else since
    until = None if ended is None else ended.iteration
    seen = [
        rates.by_gpu[gpu]
        for rates in history.rates
        if since <= rates.iteration and (until is None or rates.iteration < until)
        if gpu < len(rates.by_gpu) and not math.isnan(rates.by_gpu[gpu])
    ]
    known = seen if rate is None else [*seen, rate]
    return Straggler(
        gpu=gpu,
        rate=rate,
        peak_rate=max(known, default=None),
        since=since,
        named=begun.iteration,
        recovered=until,
        reason=begun.text("reason"),
    )


def _numbers(values: object) -> tuple[float | None, ...]:
    return tuple(number(value) for value in values) if isinstance(values, list) else ()
