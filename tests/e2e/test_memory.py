"""Plans keep to a GPU's memory: measured in a job, planned with, and refused with the numbers."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.problem import Model, Problem
from malleus_megatron.plan.rates import Rates
from malleus_megatron.planner.search import make_plan
from tests.harness.plans import plan_of
from tests.harness.ranks import run_script
from tests.harness.recipes import LLAMA, Recipe
from tests.harness.reshaping import events_of, write_plans
from tests.harness.training import Grid, assert_same_training, train, write_json

pytestmark = pytest.mark.e2e

RECIPE = Recipe(
    name="two stages",
    grid=Grid(pipelines=1, stages=2, num_layers=8, num_microbatches=8),
    flags=f"{LLAMA} --hidden-size 64 --seq-length 128 --max-position-embeddings 128",
)
FORWARD_S, BACKWARD_S, RATE = 0.004, 0.008, 4.0
PACE = {"layer_forward_s": {"1": FORWARD_S}, "layer_backward_s": {"1": BACKWARD_S}}
AGREEMENT = (0.95, 1.15)
"""Predicted over measured: upper side, and how much of it is tolerated."""


def two_stages(layers: Sequence[int]) -> Plan:
    return plan_of((8, [((gpu,), count) for gpu, count in enumerate(layers)]))


def most_layers(plan: Plan) -> int:
    return max(stage.num_layers for pipeline in plan.pipelines for stage in pipeline.stages)


def assert_predicted(event: dict[str, Any]) -> None:
    for said, seen in zip(event["predicted_mib"], event["measured_mib"], strict=True):
        print(f"predicted {said:.2f} MiB, measured {seen:.2f} MiB: {said / seen:.3f}")
        assert AGREEMENT[0] <= said / seen <= AGREEMENT[1], event


def test_the_best_plan_that_fits_is_taken_and_another_refused(tmp_path: Path) -> None:
    best = make_plan(
        Problem(
            cluster=Cluster(gpus_per_node=(2,)),
            model=Model(num_layers=8, layer_time_s=((1, FORWARD_S + BACKWARD_S),)),
            num_microbatches=8,
            tensor_parallel_sizes=(1,),
            num_pipelines=1,
            rates=Rates.of({0: RATE}),
        )
    )
    assert most_layers(best) == 7
    free, tight = tmp_path / "free", tmp_path / "tight"
    for folder in (free, tight):
        folder.mkdir()
    # What such a plan takes, in a job that has room for it.
    train(
        RECIPE.grid,
        free / "losses.jsonl",
        *("--malleus", "--malleus-sidecar", "none", "--malleus-memory", "100000"),
        *("--malleus-plan-schedule", write_plans(free, {4: two_stages((1, 7))})),
        *("--malleus-log-dir", free),
        recipe=RECIPE.words,
        iterations=6,
    )
    stock = tmp_path / "stock.jsonl"
    train(RECIPE.grid, stock, recipe=RECIPE.words, iterations=6)
    assert_same_training(free / "losses.jsonl", stock, relative=1e-6)
    recipe, heavy = events_of(free, "memory")
    assert (recipe["generation"], heavy["generation"]) == (0, 1)
    assert_predicted(heavy)
    limit = 0.95 * max(heavy["measured_mib"])
    train(
        RECIPE.grid,
        tight / "losses.jsonl",
        *("--malleus", "--malleus-memory", f"{limit}", "--malleus-log-dir", tight),
        *("--malleus-plan-schedule", write_plans(tight, {4: two_stages((1, 7))})),
        *("--malleus-pace", write_json(tight / "pace.json", PACE)),
        "--malleus-inject",
        write_json(
            tight / "injection.json",
            [{"gpu": 0, "rate": RATE, "from_iteration": 4, "to_iteration": None}],
        ),
        recipe=RECIPE.words,
        iterations=15,
    )
    (refused,) = [
        event["message"] for event in events_of(tight, "warning") if "fit" in event["message"]
    ]
    assert "stage 1: 7 layers on 1 GPUs [1] need " in refused
    assert f"{limit:g} MiB may be used" in refused
    plans = events_of(tight, "plan")
    assert plans, "the job stayed under its recipe"
    recipe, *replanned = events_of(tight, "memory")
    assert replanned
    for event in replanned:
        assert_predicted(event)
    for event in (recipe, *replanned):
        assert max(event["measured_mib"]) <= limit == event["usable_mib"]
    for plan in plans:
        assert max(itertools.chain(*plan["predicted"]["memory_mib"])) <= limit


def test_a_plan_whose_parameters_alone_do_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    outcomes = train(
        RECIPE.grid,
        tmp_path / "losses.jsonl",
        *("--malleus", "--malleus-sidecar", "none", "--malleus-memory", "2"),
        *("--malleus-plan-schedule", write_plans(tmp_path, {4: two_stages((1, 7))})),
        recipe=RECIPE.words,
        expect_exit=2,
    )
    said = "".join(outcome.output for outcome in outcomes)
    assert "--malleus-plan-schedule, iteration 4: The plan does not fit into 2 MiB" in said
    assert "not measured yet, come on top" in said


def test_out_of_memory_in_a_step_under_a_plan_says_what_to_do(tmp_path: Path) -> None:
    outcomes = run_script(
        RECIPE.grid.world,
        [
            *("-m", "tests.e2e.out_of_memory", *RECIPE.words, *RECIPE.grid.flags),
            *("--train-iters", "6", "--malleus", "--malleus-sidecar", "none"),
            *("--malleus-memory", "1000"),
            *("--malleus-plan-schedule", write_plans(tmp_path, {3: two_stages((2, 6))})),
        ],
        timeout_s=60.0,
        expect_exit=None,
    )
    said = "".join(outcome.output for outcome in outcomes)
    assert "CUDA out of memory" in said
    assert "malleus: out of memory, GPU 1, iteration 3, under plan 1 (8 x (0:2 | 1:6))" in said
    assert "--malleus-memory (900 MiB, say; now 1000 MiB (--malleus-memory))" in said
