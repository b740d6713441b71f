"""A simulation as a table and as a JSON document."""

from typing import Any

from malleus_megatron.plan.codec import plan_id
from malleus_megatron.simulator.policies import Simulation
from malleus_megatron.simulator.replay import PlanChange, Run

SCHEMA_VERSION = 1
_COLUMNS = (
    *("policy", "total s", "mean step s", "x healthy", "x capacity", "x bound"),
    *("re-plans", "paused s", "after iterations"),
)
_MOST_SHOWN = 4


def table(simulation: Simulation) -> str:
    """One line a policy; the columns are explained below it."""
    rows = [_COLUMNS, *(_row(simulation, run) for run in simulation.runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    healthy = f"healthy step {simulation.healthy_step_s:.6g} s, under the nominal plan"
    lines += [
        "",
        f"{simulation.num_iterations} iterations, {len(simulation.trace)} situations; {healthy}.",
        f"Ratios are of total times; the bound is proved by the {simulation.bound_by}.",
        "After iterations: from a change of rates to each new plan.",
    ]
    return "\n".join(lines) + "\n"


def document(simulation: Simulation) -> dict[str, Any]:
    """The same as JSON values, with every span and every change of plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "num_iterations": simulation.num_iterations,
        "healthy_step_time_s": simulation.healthy_step_s,
        "bound_by": simulation.bound_by,
        "situations": [
            {
                "from_iteration": situation.from_iteration,
                "to_iteration": situation.to_iteration,
                "rates": {str(gpu): rate for gpu, rate in situation.rates},
            }
            for situation in simulation.trace
        ],
        "policies": {run.policy: _run(simulation, run) for run in simulation.runs},
    }


def _run(simulation: Simulation, run: Run) -> dict[str, Any]:
    return {
        "total_s": run.total_s,
        "mean_step_time_s": run.mean_step_s,
        "ratio_to_healthy": _to_healthy(simulation, run),
        "ratio_to_capacity": run.total_s / simulation.capacity.total_s,
        "ratio_to_bound": run.total_s / simulation.bound.total_s,
        "num_replans": len(run.changes),
        "paused_s": run.pauses_s,
        "step_times": [
            {
                "from_iteration": span.from_iteration,
                "to_iteration": span.to_iteration,
                "step_time_s": span.step_time_s,
                "pause_s": span.pause_s,
            }
            for span in run.spans
        ],
        "plan_changes": [_change(change) for change in run.changes],
    }


def _change(change: PlanChange) -> dict[str, Any]:
    return {
        "iteration": change.iteration,
        "waited_iterations": change.waited_iterations,
        "pause_s": change.pause_s,
        "moved_bytes": change.moved_bytes,
        "plan": plan_id(change.plan),
        "microbatches": list(change.plan.microbatch_counts),
        "standby": list(change.plan.standby),
    }


def _row(simulation: Simulation, run: Run) -> tuple[str, ...]:
    waits = [str(change.waited_iterations) for change in run.changes]
    shown = waits[:_MOST_SHOWN] + (["..."] if len(waits) > _MOST_SHOWN else [])
    ratios = (
        _to_healthy(simulation, run),
        run.total_s / simulation.capacity.total_s,
        run.total_s / simulation.bound.total_s,
    )
    return (
        run.policy,
        f"{run.total_s:.6g}",
        f"{run.mean_step_s:.6g}",
        *(f"{ratio:.3f}" for ratio in ratios),
        str(len(run.changes)),
        f"{run.pauses_s:.6g}",
        ", ".join(shown) or "-",
    )


def _to_healthy(simulation: Simulation, run: Run) -> float:
    return run.mean_step_s / simulation.healthy_step_s
