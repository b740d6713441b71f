"""`malleus explain`: what bounds the step under a plan, and what each straggler costs."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malleus_megatron.errors import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from malleus_megatron.plan.plan import Plan
    from malleus_megatron.plan.problem import Problem
    from malleus_megatron.planner.explanation import Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    parser.add_argument(
        "--problem", type=Path, metavar="PROBLEM.json", help="costs and rates; without: the picture"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(arguments: argparse.Namespace) -> int:
    """Explain a plan; 2 if it does not fit the problem, which is said line by line.

    Raises:
        BadInputError: wrong input, or a plan for another cluster (exit status 2).
    """
    from malleus_megatron.plan.codec import read_plan
    from malleus_megatron.plan.problem_codec import read_problem
    from malleus_megatron.plan.render import render_plan
    from malleus_megatron.planner.explanation import explain

    plan = read_plan(arguments.plan)
    status = 0
    if arguments.problem is None:
        document: dict[str, Any] = {"schema_version": 1, "predicted": _predicted(plan)}
        text = render_plan(plan, None, plan.predicted.memory_mib if plan.predicted else None)
    else:
        problem = read_problem(arguments.problem)
        found = explain(problem, plan)
        bound = _bound(problem, plan)
        status = EXIT_BAD_INPUT if found.faults else 0
        document = _document(plan, found) | {"lower_bound": bound}
        text = render_plan(plan, found.costs.stage_times_s, found.costs.memory_mib)
        text += "\n" + "\n".join(_sentences(plan, found, bound)) + "\n"
    if arguments.json:
        text = json.dumps(document, sort_keys=True, allow_nan=False) + "\n"
    sys.stdout.write(text)
    return status


def _predicted(plan: "Plan") -> dict[str, Any] | None:
    return None if plan.predicted is None else asdict(plan.predicted)


def _document(plan: "Plan", found: "Explanation") -> dict[str, Any]:
    return {
        "schema_version": 1,
        "objective": plan.objective,
        "step_time_s": _finite(found.costs.step_time_s),
        "bottleneck": _finite(found.costs.bottleneck),
        "bound_by": {"pipeline": found.pipeline, "stage": found.stage, "gpu": found.gpu},
        "stage_times_s": [[_finite(t) for t in times] for times in found.costs.stage_times_s],
        "memory_mib": found.costs.memory_mib,
        "nominal_step_time_s": _finite(found.nominal_step_time_s),
        "nominal_healthy_step_time_s": _finite(found.nominal_healthy_step_time_s),
        "nominal_fits": None if found.nominal_shortages is None else not found.nominal_shortages,
        "stragglers": [
            asdict(cost) | {"rate": "inf" if math.isinf(cost.rate) else cost.rate}
            for cost in found.stragglers
        ],
        "faults": list(found.faults),
    }


def _bound(problem: "Problem", plan: "Plan") -> float | None:
    """What was proved when the plan was made, if it was made for this problem."""
    was_for = None if plan.planning is None else plan.planning.problem
    if plan.predicted is None or was_for != problem.digest:
        return None
    return plan.predicted.lower_bound


def _sentences(plan: "Plan", found: "Explanation", bound: float | None) -> list[str]:
    stage = plan.pipelines[found.pipeline].stages[found.stage]
    time_s = found.costs.stage_times_s[found.pipeline][found.stage]
    lines = [
        f"The step takes {found.costs.step_time_s:.6g} s. Pipeline {found.pipeline} ends last; its "
        f"slowest stage is {found.stage} ({time_s:.6g} s a micro-batch, {stage.num_layers} layers "
        f"on GPUs {list(stage.gpus)}), and there GPU {found.gpu}."
    ]
    if bound is not None:
        value = found.costs.value(plan.objective)
        lines.append(
            f"In the objective {plan.objective} it has {value:.6g}; no plan is below {bound:.6g}, "
            "as was proved when it was made."
        )
    elif plan.predicted is not None and plan.predicted.lower_bound is not None:
        lines.append(
            f"What was proved when the plan was made, that none is below "
            f"{plan.predicted.lower_bound:.6g}, is not known of this problem."
        )
    lines.append(_nominal(found))
    for cost in found.stragglers:
        place = "on standby" if cost.standby else f"costs {cost.in_plan_s:.6g} s in this plan"
        lines.append(
            f"GPU {cost.gpu} (rate {cost.rate:g}): {place}; {cost.lost_share:.2%} of the cluster's "
            "throughput is missing because of it."
        )
    return [*lines, *(f"FAULT: {fault}" for fault in found.faults)]


def _nominal(found: "Explanation") -> str:
    if math.isinf(found.nominal_healthy_step_time_s):
        return "There is no uniform plan with so many pipelines."
    healthy = f"{found.nominal_healthy_step_time_s:.6g} s with all GPUs healthy"
    if math.isinf(found.nominal_step_time_s):
        return f"The uniform plan cannot run: it needs a failed GPU ({healthy})."
    line = f"The uniform plan would take {found.nominal_step_time_s:.6g} s ({healthy})"
    if found.nominal_shortages:
        return f"{line}, but does not fit in memory. {found.nominal_shortages[0]}"
    return f"{line}."


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
