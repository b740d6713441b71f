"""All numbers of a run that a page shows, and the same as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from malleus_megatron.pages.bands import Band, bands, width_of_spans
from malleus_megatron.pages.headline import headline
from malleus_megatron.pages.history import Event, History
from malleus_megatron.pages.phases import (
    Memory,
    Move,
    Phase,
    Straggler,
    memory,
    moves,
    phases,
    stragglers,
)
from malleus_megatron.pages.rate_table import RateTable, rate_table
from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.plan import Plan

MOST_POINTS = 400
"""Of a line; more iterations are put together into bands."""
MOST_EVENTS = 1000
"""The latest; a page shows no more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened, as a line in the pictures."""

    kind: str
    """plan, straggler, recovered, injected."""
    iteration: int
    label: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A plan in force from an iteration on, with the rates of its GPUs."""

    generation: int
    plan: Plan
    rates: Mapping[int, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What a page shows of a run."""

    headline: str
    level: str
    level_reason: str
    num_gpus: int
    num_iterations: int
    first_iteration: int
    last_iteration: int
    step_times: tuple[Band, ...]
    losses: tuple[Band, ...]
    iterations_per_point: int
    last_step_s: float | None
    last_loss: float | None
    num_bad_losses: int
    """Iterations whose loss was told and is no finite number."""
    phases: tuple[Phase, ...]
    stragglers: tuple[Straggler, ...]
    moves: tuple[Move, ...]
    memory: Memory | None
    rates: RateTable | None
    marks: tuple[Mark, ...]
    places: tuple[Place, ...]
    """Oldest first; the last one is in force, if its plan is known."""
    events: tuple[Event, ...]
    """The latest first."""
    num_events: int

    @property
    def latest_phase(self) -> Phase | None:
        """Of the plan in force."""
        return self.phases[-1] if self.phases else None

    @property
    def now(self) -> Place | None:
        """The plan in force, if it is known."""
        latest = self.latest_phase
        if not self.places or (latest and self.places[-1].generation != latest.generation):
            return None
        return self.places[-1]

    @property
    def active(self) -> tuple[Straggler, ...]:
        """Stragglers that have not recovered."""
        return tuple(one for one in self.stragglers if one.recovered is None)


def tell(history: History, plans: Mapping[int, Plan]) -> Story:
    """Put together what a page shows.

    Args:
        history: The run.
        plans: Those that are known, by generation.
    """
    cut, found = phases(history), stragglers(history)
    steps = history.steps
    first = steps[0].iteration if steps else 1
    last = steps[-1].iteration if steps else 0
    width = width_of_spans(first, last, MOST_POINTS)
    level = next(iter(reversed(history.of_kind("level"))), None)
    return Story(
        headline=headline(history, found),
        level="" if level is None else level.text("level"),
        level_reason="" if level is None else level.text("reason"),
        num_gpus=max([history.num_gpus, *(len(list(p.all_gpus())) for p in plans.values())]),
        num_iterations=history.num_iterations,
        first_iteration=first,
        last_iteration=last,
        step_times=bands(((s.iteration, s.step_time_s) for s in steps), first, width),
        losses=bands(((s.iteration, s.loss) for s in steps), first, width),
        iterations_per_point=width,
        last_step_s=steps[-1].step_time_s if steps else None,
        last_loss=steps[-1].loss if steps else None,
        num_bad_losses=sum(s.loss is not None and not math.isfinite(s.loss) for s in steps),
        phases=cut,
        stragglers=found,
        moves=moves(history),
        memory=memory(history),
        rates=rate_table(history),
        marks=_marks(history, found),
        places=_places(history, cut, plans),
        events=tuple(reversed(history.events))[:MOST_EVENTS],
        num_events=len(history.events),
    )


def story_to_json(story: Story) -> dict[str, Any]:
    """The numbers as JSON values, but for infinite ones; plans as in plan.json."""
    document: dict[str, Any] = {
        part.name: _values(getattr(story, part.name))
        for part in fields(story)
        if part.name not in {"events", "places", "rates"}
    }
    now, rates = story.now, story.rates
    return document | {
        "plan": None if now is None else plan_to_json(now.plan),
        "generation": None if story.latest_phase is None else story.latest_phase.generation,
        "rates": None
        if rates is None
        else {
            "starts": rates.starts,
            "end": rates.end,
            "rows": [
                {"gpus": row.gpus, "rates": row.rates} for row in (*rates.rows, *rates.groups)
            ],
        },
        "events": _counts(story.events),
    }


def _values(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_values(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def _counts(events: tuple[Event, ...]) -> dict[str, int]:
    kinds = [event.kind for event in events]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _marks(history: History, found: tuple[Straggler, ...]) -> tuple[Mark, ...]:
    marks = [
        Mark(
            kind="plan",
            iteration=event.iteration,
            label=str(event.integer("generation")),
            what=f"plan {event.integer('generation')}: {event.text('layout')}",
        )
        for event in history.of_kind("plan")
    ]
    for event in history.of_kind("injection"):
        gpu, rate = event.integer("gpu"), event.number("rate")
        for field, what in (
            ("from_iteration", f"rate {rate} injected"),
            ("to_iteration", "no more"),
        ):
            iteration = event.integer(field)
            if iteration is not None:
                marks.append(
                    Mark(kind="injected", iteration=iteration, label="i", what=f"GPU {gpu}: {what}")
                )
    for one in found:
        marks.append(
            Mark(
                kind="straggler",
                iteration=one.since,
                label="▲",
                what=f"GPU {one.gpu} stands out, named after iteration {one.named}",
            )
        )
        if one.recovered is not None:
            what = f"GPU {one.gpu} has recovered"
            marks.append(Mark(kind="recovered", iteration=one.recovered, label="▽", what=what))
    return tuple(sorted(marks, key=lambda mark: (mark.iteration, mark.kind)))


def _places(
    history: History, cut: tuple[Phase, ...], plans: Mapping[int, Plan]
) -> tuple[Place, ...]:
    """Earlier plans with the rates at their start, for which they were made; the last as of now."""
    return tuple(
        Place(
            generation=phase.generation,
            plan=plan,
            rates={
                gpu: history.rate_at(gpu, None if phase is cut[-1] else phase.first)
                for gpu in plan.all_gpus()
            },
        )
        for phase in cut
        if (plan := plans.get(phase.generation)) is not None
    )
