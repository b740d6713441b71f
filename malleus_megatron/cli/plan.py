"""`malleus plan`: a problem in, a plan out."""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from malleus_megatron.cli.outputs import write_output
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Problem

OBJECTIVE_CHOICES = ("step-time", "bottleneck")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json")
    parser.add_argument("--rates", type=Path, metavar="RATES.json", help="instead of the problem's")
    parser.add_argument("--objective", choices=OBJECTIVE_CHOICES, default="step-time")
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help="write the plan here")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON document")
    parser.add_argument("--seed", type=int, default=0, help="of the local search (default 0)")


def main(arguments: argparse.Namespace) -> int:
    """Plan, write, print.

    Raises:
        BadInputError: wrong input (exit status 2).
        InfeasiblePlanError: no plan (exit status 1).
    """
    from malleus_megatron.plan.codec import plan_to_json, read_rates
    from malleus_megatron.plan.problem_codec import read_problem
    from malleus_megatron.planner.search import make_plan

    problem = read_problem(arguments.problem)
    if arguments.rates is not None:
        problem = replace(problem, rates=read_rates(arguments.rates))
    started_s = time.monotonic()
    plan = make_plan(problem, arguments.objective, seed=arguments.seed, tell=_tell)
    seconds = time.monotonic() - started_s
    text = json.dumps(plan_to_json(plan), sort_keys=True, indent=None, allow_nan=False) + "\n"
    if arguments.out is not None:
        write_output("--out", arguments.out, text)
    if arguments.json:
        sys.stdout.write(text)
    else:
        sys.stdout.write(_report(problem, plan))
    sys.stderr.write(f"planned in {seconds:.2f} s\n")
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _report(problem: Problem, plan: Plan) -> str:
    from malleus_megatron.cost.prediction import plan_costs
    from malleus_megatron.plan.render import render_plan

    costs = plan_costs(problem, plan)
    lines = [render_plan(plan, costs.stage_times_s, costs.memory_mib)]
    predicted = plan.predicted
    if predicted is not None and predicted.lower_bound is not None:
        value = costs.value(plan.objective)
        gap = 1 - predicted.lower_bound / value
        unit = " s" if plan.objective == "step-time" else ""
        lines.append(
            f"step {costs.step_time_s:.6g} s, all healthy {predicted.healthy_step_time_s:.6g} s; "
            f"{plan.objective} {value:.6g}{unit}, no plan is below "
            f"{predicted.lower_bound:.6g}{unit} (gap {gap:.2%})\n"
        )
    return "\n".join(lines)
