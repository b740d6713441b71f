"""What the demo's two jobs show: the figures, and a table of them. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from malleus_megatron.errors import MalleusError

SETTLING = 2
"""Iterations left out at the start of the job and after a change, while caches and windows fill."""

type Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From this iteration on GPUs have other rates."""

    iteration: int
    name: str
    rates: Mapping[int, float]
    """Of the GPUs that are not healthy then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens in the demo, and the plan that it begins under."""

    changes: Sequence[Change]
    plan: str
    """In short."""
    micro_batches: Sequence[int]
    num_iterations: int

    def injection(self) -> list[dict[str, Any]]:
        """As injection.json."""
        last = Change(iteration=self.num_iterations + 1, name="", rates={})
        return [
            {
                "gpu": gpu,
                "rate": rate,
                "from_iteration": change.iteration,
                "to_iteration": following.iteration,
            }
            for change, following in pairwise([*self.changes, last])
            for gpu, rate in change.rates.items()
        ]


def summarise(script: Script, events: Events, stock: Events) -> dict[str, Any]:
    """Draw the figures from what both jobs wrote.

    Raises:
        MalleusError: a change of rates without a re-plan after it, or the reference is not whole.
    """
    steps = [event for event in events if event["event"] == "iteration"]
    moves = [event for event in events if event["event"] == "migration"]
    reference = {line["iteration"]: line["loss"] for line in stock}
    healthy = _median(steps, 1 + SETTLING, script.changes[0].iteration)
    phases: list[dict[str, Any]] = [
        {"name": "healthy", "step_time_s": healthy, "plan": script.plan},
    ]
    ends = [*(change.iteration for change in script.changes[1:]), script.num_iterations + 1]
    for change, end in zip(script.changes, ends, strict=True):
        phases += _phases(change, end, events, phases[-1]["plan"])
    slow, first = phases[1], phases[2]
    return {
        "paced": True,
        "healthy_step_time_s": healthy,
        "straggling_step_time_s": slow["step_time_s"],
        "replanned_step_time_s": first["step_time_s"],
        "predicted_step_time_s": first["predicted_step_time_s"],
        "injected": {str(gpu): rate for gpu, rate in script.changes[0].rates.items()},
        "measured_rates": _rates_at(events, script.changes[0], ends[0]),
        "micro_batches_before": list(script.micro_batches),
        "micro_batches_after": first["micro_batches"],
        "plan_before": script.plan,
        "plan_after": first["plan"],
        "migrated_bytes": sum(move["bytes"] for move in moves),
        "migration_s": sum(move["seconds"] for move in moves),
        "iterations_until_replan": first["iterations_until_replan"],
        "max_loss_difference": _largest_difference(steps, reference),
        "iterations": len(steps),
        "phases": phases,
    }


def table(summary: Mapping[str, Any]) -> str:
    """All phases, for a person."""
    healthy = summary["healthy_step_time_s"]
    lines = [f"{'':44} {'step':>8} {'vs healthy':>11}  plan: micro-batches x (GPUs:layers | ...)"]
    lines += [
        f"{phase['name']:44} {phase['step_time_s']:6.2f} s "
        f"{phase['step_time_s'] / healthy:10.2f}x  {phase['plan']}"
        for phase in summary["phases"]
    ]
    injected = ", ".join(f"GPU {gpu} to {rate}" for gpu, rate in summary["injected"].items())
    measured = ", ".join(
        f"{summary['measured_rates'].get(gpu, 1.0):.2f}" for gpu in summary["injected"]
    )
    lines += [
        "",
        f"First slowed: {injected}; measured {measured}. The plan came "
        f"{summary['iterations_until_replan']} iterations later and predicted "
        f"{summary['predicted_step_time_s']:.2f} s. All switches together moved "
        f"{summary['migrated_bytes'] / 2**20:.1f} MiB in {summary['migration_s']:.2f} s, in "
        "memory.",
        f"Largest loss difference to the stock job over {summary['iterations']} iterations: "
        f"{summary['max_loss_difference']:.1e}",
        "Step times are of a paced run: they measure the plan and the protocol, not this machine.",
    ]
    return "\n".join(lines)


def _phases(change: Change, end: int, events: Events, plan: str) -> list[dict[str, Any]]:
    """Before the new plan, and under it."""
    steps = [event for event in events if event["event"] == "iteration"]
    plans = [
        event
        for event in events
        if event["event"] == "plan" and change.iteration <= event["iteration"] < end
    ]
    if not plans or plans[-1]["iteration"] + SETTLING >= end:
        raise MalleusError(
            f"After iteration {change.iteration} ({change.name}) the job went on without a re-plan "
            f"until {end}; see events.jsonl."
        )
    first, last = plans[0], plans[-1]
    return [
        {
            "name": f"{change.name}, old plan",
            "step_time_s": _median(steps, change.iteration, first["iteration"]),
            "plan": plan,
        },
        {
            "name": f"{change.name}, new plan",
            "step_time_s": _median(steps, last["iteration"] + SETTLING, end),
            "plan": last["layout"],
            "micro_batches": last["micro_batches"],
            "predicted_step_time_s": last["predicted"]["step_time_s"],
            "iterations_until_replan": first["iteration"] - change.iteration,
        },
    ]


def _rates_at(events: Events, change: Change, end: int) -> dict[str, float]:
    """The last rates that were known while the change's own held."""
    known = [
        event["rates"]
        for event in events
        if event["event"] == "rates" and change.iteration <= event["iteration"] < end
    ]
    return dict(known[-1]) if known else {}


def _median(steps: Events, start: int, end: int) -> float:
    return float(
        statistics.median(step["step_time_s"] for step in steps if start <= step["iteration"] < end)
    )


def _largest_difference(steps: Events, reference: Mapping[int, float]) -> float:
    for step in steps:
        if step["iteration"] not in reference:
            raise MalleusError(f"The stock job recorded no loss for iteration {step['iteration']}.")
    return max(abs(float(step["loss"]) - reference[step["iteration"]]) for step in steps)
