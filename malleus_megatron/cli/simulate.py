"""`malleus simulate`: a job under a trace of stragglers, and what each policy makes of it."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from malleus_megatron.cli.outputs import check_ending, write_output

if TYPE_CHECKING:
    from malleus_megatron.plan.problem import Problem
    from malleus_megatron.simulator.policies import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json")
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="INJECTION.json", help="rates by iteration"
    )
    parser.add_argument(
        "--policy", metavar="NAME,...", help="malleus, stock, ... (default all; docs/simulate.md)"
    )
    parser.add_argument(
        "--iterations", type=int, metavar="N", help="default: 50 after the trace's last change"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="draw step times here")
    cost = parser.add_argument_group("costs that the problem does not say")
    for flag, default, text in (
        ("--forward-share", None, "the forward's part of a stage's time (default 1/3)"),
        ("--transfer-seconds", 0.0, "one message between stages (default 0)"),
        ("--gradient-seconds", 0.0, "from the last pipeline's end to the step's (default 0)"),
        ("--restart-seconds", 300.0, "checkpoint, end, start and load (default 300)"),
        ("--migration-seconds", 2.0, "of each migration, beside its bytes (default 2)"),
        ("--migration-bytes-per-second", 10e9, "what a GPU sends or receives (default 1e10)"),
        ("--layer-state-mib", None, "of a layer, over its TP group (default: memory model)"),
    ):
        cost.add_argument(flag, type=float, default=default, metavar="X", help=text)


def main(arguments: argparse.Namespace) -> int:
    """Simulate, draw, print.

    Raises:
        BadInputError: wrong input (exit status 2).
        InfeasiblePlanError: the problem has no plan to start from (exit status 1).
    """
    from malleus_megatron.plan.injection import read_injection
    from malleus_megatron.plan.problem_codec import read_problem
    from malleus_megatron.simulator.picture import svg
    from malleus_megatron.simulator.policies import POLICIES, simulate
    from malleus_megatron.simulator.report import document, table
    from malleus_megatron.simulator.trace import default_num_iterations

    check_ending("--plot", arguments.plot, (".svg",))
    problem = read_problem(arguments.problem)
    trace = read_injection(arguments.trace)
    if problem.rates.by_gpu:
        _tell("the problem's own rates are left out; the trace has the rates.")
    names = POLICIES if arguments.policy is None else arguments.policy.split(",")
    simulation = simulate(
        problem,
        trace,
        num_iterations=arguments.iterations
        if arguments.iterations is not None
        else default_num_iterations(trace),
        names=[name.strip() for name in names],
        settings=_settings(arguments, problem),
        tell=lambda name: _tell(f"{name} ..."),
    )
    if arguments.plot is not None:
        title = f"{arguments.problem.name}, {arguments.trace.name}"
        write_output("--plot", arguments.plot, svg(simulation, title))
    if arguments.json:
        print(json.dumps(document(simulation), sort_keys=True, allow_nan=False))
    else:
        sys.stdout.write(table(simulation))
    return 0


def _settings(arguments: argparse.Namespace, problem: "Problem") -> "Settings":
    from malleus_megatron.simulator.clock import FORWARD_SHARE, StepSettings
    from malleus_megatron.simulator.policies import Settings
    from malleus_megatron.simulator.states import MigrationSettings, StateSizes

    share = arguments.forward_share
    return Settings(
        step=StepSettings(
            forward_share=FORWARD_SHARE if share is None else share,
            transfer_s=arguments.transfer_seconds,
            gradient_sum_s=arguments.gradient_seconds,
        ),
        migration=MigrationSettings(
            bytes_per_s=arguments.migration_bytes_per_second, fixed_s=arguments.migration_seconds
        ),
        states=StateSizes.of(problem, layer_mib=arguments.layer_state_mib),
        restart_s=arguments.restart_seconds,
    )


def _tell(line: str) -> None:
    sys.stderr.write(f"simulate: {line}\n")
    sys.stderr.flush()
