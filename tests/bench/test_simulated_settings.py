"""What every policy makes of the situations on 64 and 1024 GPUs, simulated.

Writes docs/results/simulation.json; scripts/results_page.py makes tables of it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.injection import InjectedRate, Injection
from malleus_megatron.plan.problem import Problem
from malleus_megatron.plan.problem_codec import problem_from_json
from malleus_megatron.plan.rates import Rates
from malleus_megatron.simulator.policies import Settings, simulate
from malleus_megatron.simulator.replay import Run
from malleus_megatron.simulator.trace import Situation, situations
from tests.harness.problems import SHARED, shared_problem

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not SHARED.is_dir(), reason="the known problems are not there"),
]

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "simulation.json"
HELD = 50
POLICIES = ("stock", "rebalance", "equal-tp", "restart", "templates", "malleus", "bound")
SITUATIONS = {
    "healthy": {},
    "one GPU at 2.57": {16: 2.57},
    "one GPU at 5.42": {16: 5.42},
    "one GPU at 12.53": {16: 12.53},
    "two on two nodes": {16: 2.57, 0: 5.42},
    "a whole node at 2.35": dict.fromkeys(range(8), 2.35),
    "three": {16: 2.57, 0: 5.42, 8: 12.53},
}


def wide(problem: Problem) -> Problem:
    """Twice the nodes, pipelines and micro-batches."""
    nodes = problem.cluster.gpus_per_node * 2
    assert problem.num_pipelines is not None
    return replace(
        problem,
        cluster=Cluster(gpus_per_node=nodes, memory_mib=problem.cluster.memory_mib),
        num_pipelines=2 * problem.num_pipelines,
        num_microbatches=2 * problem.num_microbatches,
    )


def setting(name: str) -> Problem:
    problem = replace(problem_from_json(shared_problem(name)), rates=Rates())
    return wide(problem) if name == "B" else problem


SETTINGS = {
    "32B, 64 GPUs": "B",
    "70B, 64 GPUs": "D",
    "110B, 64 GPUs": "E",
    "1024 GPUs": "scale-1024-1",
}


def trace() -> Injection:
    return Injection(
        entries=tuple(
            InjectedRate(
                gpu=gpu,
                rate=rate,
                from_iteration=1 + HELD * number,
                to_iteration=1 + HELD * (number + 1),
            )
            for number, rates in enumerate(SITUATIONS.values())
            for gpu, rate in rates.items()
        )
    )


def settled_s(run: Run, situation: Situation) -> float:
    """The last step of a situation, without a pause."""
    last = situation.to_iteration - 1
    span = next(s for s in run.spans if s.from_iteration <= last < s.to_iteration)
    return span.step_time_s - span.pause_s


def test_every_policy_in_every_situation() -> None:
    document: dict[str, Any] = {"held": HELD, "settings": {}}
    for title, name in SETTINGS.items():
        problem, num_iterations = setting(name), HELD * len(SITUATIONS)
        simulation = simulate(
            problem,
            trace(),
            num_iterations=num_iterations,
            names=POLICIES,
            settings=Settings(),
        )
        found = situations(trace(), num_iterations)
        assert len(found) == len(SITUATIONS)
        steps = {
            run.policy: dict(zip(SITUATIONS, (settled_s(run, part) for part in found), strict=True))
            for run in simulation.runs
        }
        document["settings"][title] = {
            "problem": name,
            "num_gpus": problem.cluster.num_gpus,
            "num_microbatches": problem.num_microbatches,
            "num_pipelines": problem.num_pipelines,
            "healthy_step_s": simulation.healthy_step_s,
            "bound_by": simulation.bound_by,
            "step_s": steps,
            "total_s": {run.policy: run.total_s for run in simulation.runs},
        }
        for situation in SITUATIONS:
            assert steps["malleus"][situation] >= steps["bound"][situation] * (1 - 1e-9)
            assert steps["malleus"][situation] <= 1.01 * steps["stock"][situation], situation
        print(
            title, {k: round(v / simulation.healthy_step_s, 3) for k, v in steps["malleus"].items()}
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
