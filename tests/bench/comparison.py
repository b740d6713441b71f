"""What the three jobs of a bench show, situation by situation. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from malleus_megatron.simulator.clock import StepSettings
from malleus_megatron.simulator.policies import Settings, simulate
from malleus_megatron.simulator.replay import Run
from tests.bench.paced_jobs import SHORT_HELD, Step, settled_s
from tests.bench.situations import Span, Work, injection, spans

URGENT = 2.57
"""From this rate on a new plan is due within six iterations."""
SIMULATED = {"stock": "stock", "split": "rebalance", "malleus": "malleus"}
"""The simulator's policy for each job."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was run: the steps of each job, and the events of the closed loop."""

    work: Work
    held: Sequence[int]
    steps: Mapping[str, Sequence[Step]]
    events: Sequence[Mapping[str, Any]]

    def trace(self, job: str) -> tuple[Span, ...]:
        """The situations as that job was shown them."""
        return spans(self.held if job == "malleus" else SHORT_HELD)


def compared(measured: Measured) -> list[dict[str, Any]]:
    """One row a situation: step times, their ratios, and how the new plan came."""
    rows = []
    healthy_s = _settled(measured, "stock", 0)
    healthy_bound_s = measured.work.bound_s({})
    seconds = {step.iteration: step.seconds for step in measured.steps["malleus"]}
    simulated = {name: _simulated(measured, name) for name in SIMULATED}
    before: Mapping[int, float] = {}
    for number, span in enumerate(measured.trace("malleus")):
        rates = span.situation.rates
        bound_s = measured.work.bound_s(rates)
        target_s = healthy_s * bound_s / healthy_bound_s
        row: dict[str, Any] = {
            "situation": span.situation.name,
            "rates": {str(gpu): rate for gpu, rate in rates.items()},
            "urgent": _slower(before, rates),
            "bound_s": bound_s,
            "target_s": target_s,
        }
        for name in SIMULATED:
            settled = _settled(measured, name, number)
            forecast_s = _step_in(simulated[name], span.end - 1)
            row[name] = {
                "step_s": settled,
                "to_healthy": settled / healthy_s,
                "to_target": settled / target_s,
                "simulated_s": forecast_s,
                "to_simulated": settled / forecast_s,
            }
        row["malleus"] |= _arrival(measured.events, span, seconds)
        rows.append(row)
        before = rates
    return rows


def planning_ratio(measured: Measured) -> float:
    """The longest step in which the planner may have worked, to the situation's other slow steps.

    From the naming of a straggler to the first step under the new plan, in every situation that
    has both; the reference is the situation's steps before.
    """
    ratios = [1.0]
    seconds = {step.iteration: step.seconds for step in measured.steps["malleus"]}
    for span in measured.trace("malleus"):
        named = _first(measured.events, "straggler", span)
        planned = _first(measured.events, "plan", span)
        if named is None or planned is None or planned - named < 1:
            continue
        before = [seconds[i] for i in range(span.start, named + 1)]
        # The step before the switch holds the switch itself: it is timed to the next beginning.
        during = [seconds[i] for i in range(named + 1, planned - 1)]
        ratios += [time / statistics.median(before) for time in during]
    return max(ratios)


def largest_difference(
    events: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]
) -> float:
    """Of losses, relative, over all iterations of the closed loop."""
    theirs = {line["iteration"]: line["loss"] for line in undisturbed}
    mine = {e["iteration"]: e["loss"] for e in events if e["event"] == "iteration"}
    assert mine.keys() == theirs.keys()
    return max(float(abs(mine[i] / theirs[i] - 1)) for i in theirs)


def _slower(before: Mapping[int, float], now: Mapping[int, float]) -> list[int]:
    """The GPUs that have turned slow enough for it to be seen at once."""
    return [gpu for gpu, rate in now.items() if rate >= URGENT and rate > before.get(gpu, 1.0)]


def _settled(measured: Measured, job: str, number: int) -> float:
    span = measured.trace(job)[number]
    return settled_s(measured.steps[job], span, last=4 if job == "malleus" else 2)


def _arrival(
    events: Sequence[Mapping[str, Any]], span: Span, seconds: Mapping[int, float]
) -> dict[str, Any]:
    """The last plan in force in the span, how it came, and what it cost."""
    plans = [e for e in events if e["event"] == "plan" and e["iteration"] < span.end]
    mine = [e for e in plans if e["iteration"] >= span.start]
    moves = [
        e for e in events if e["event"] == "migration" and span.start <= e["iteration"] < span.end
    ]
    return {
        "iterations_to_plan": mine[0]["iteration"] - span.start if mine else None,
        "plans": len(mine),
        "first_step_s": seconds[span.start],
        "layout": plans[-1]["layout"] if plans else "nominal",
        "predicted_s": plans[-1]["predicted"].get("step_time_s") if plans else None,
        "migrated_bytes": sum(e["bytes"] for e in moves),
        "migration_s": sum(e["seconds"] for e in moves),
    }


def _first(events: Sequence[Mapping[str, Any]], kind: str, span: Span) -> int | None:
    found = [
        int(e["iteration"])
        for e in events
        if e["event"] == kind and span.start <= e["iteration"] < span.end
    ]
    return min(found, default=None)


def _simulated(measured: Measured, name: str) -> Run:
    """Through the long situations: a simulated controller needs time, the split job is told."""
    trace = measured.trace("malleus")
    work = measured.work
    simulation = simulate(
        replace(work.problem(), current_plan=work.nominal),
        injection(trace),
        num_iterations=trace[-1].end - 1,
        names=[SIMULATED[name]],
        settings=Settings(step=StepSettings()),
    )
    return simulation.runs[0]


def _step_in(run: Run, iteration: int) -> float:
    span = next(s for s in run.spans if s.from_iteration <= iteration < s.to_iteration)
    return span.step_time_s
