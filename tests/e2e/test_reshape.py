"""Under any sequence of valid plans a job trains as the stock uniform job does.

A run trains one recipe through several sequences: two random plans, an iteration each, and back
to the nominal plan. MALLEUS_SEQUENCES=N runs N sequences a recipe, other ones each time.
"""

import itertools
import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from malleus_megatron.plan.codec import plan_from_json, plan_to_json
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.seats import with_ascending_tp_ranks
from tests.harness.recipes import BF16_RECIPES, RECIPES, Recipe, random_job_plan
from tests.harness.training import assert_same_training, read_lines, train, write_json

pytestmark = pytest.mark.e2e

PLANS_A_SEQUENCE = 2
SEQUENCES = int(os.environ.get("MALLEUS_SEQUENCES", "0"))


@pytest.mark.timeout(420 + 30 * SEQUENCES)
@pytest.mark.parametrize("recipe", [*RECIPES, *BF16_RECIPES], ids=lambda recipe: recipe.name)
def test_losses_and_gradient_norms_are_stocks(recipe: Recipe, tmp_path: Path) -> None:
    @settings(
        max_examples=1,
        derandomize=not SEQUENCES,
        database=None,
        deadline=None,
        # A run takes a minute, and a seed cannot be shrunk.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = random.Random(f"{recipe.name} {seed} {os.getpid() if SEQUENCES else 0}")
        sequences = [
            [random_job_plan(rng, recipe.grid, recipe.degrees) for _ in range(PLANS_A_SEQUENCE)]
            for _ in range(SEQUENCES or recipe.sequences)
        ]
        train_through(recipe, sequences, tmp_path)

    check()


def test_the_plans_are_of_every_kind() -> None:
    """Otherwise the test above would say less than it seems to."""
    rng = random.Random(0)
    plans = [random_job_plan(rng, RECIPES[0].grid, (1, 2, 4)) for _ in range(200)]
    stages = [pipe.stages for plan in plans for pipe in plan.pipelines]
    assert any(len({len(stage.gpus) for stage in pipe}) > 1 for pipe in stages)
    assert any(len(pipe) == 1 for pipe in stages)
    assert any(pipe[-1].num_layers == 0 and len(pipe) > 1 for pipe in stages)
    assert any(pipe[0].num_layers == 0 and len(pipe) > 1 for pipe in stages)
    assert any(
        pipe.num_microbatches < len(pipe.stages) for plan in plans for pipe in plan.pipelines
    )
    assert any(plan.standby for plan in plans)
    assert any(pipe[0].gpus > pipe[-1].gpus for pipe in stages)
    assert {len(stage.gpus) for pipe in stages for stage in pipe} == {1, 2, 4}


def train_through(recipe: Recipe, sequences: list[list[Plan]], folder: Path) -> None:
    each = recipe.grid.num_microbatches // recipe.grid.pipelines
    nominal = plan_from_json(recipe.grid.plan([each] * recipe.grid.pipelines))
    plans = [plan for sequence in sequences for plan in (*sequence, nominal)]
    documents = [plan_to_json(plan) for plan in plans]
    schedule = []
    for number, document in enumerate(documents):
        name = f"plan-{number}.json"
        write_json(folder / name, document)
        schedule.append({"iteration": 2 + number, "plan": name})
    iterations, timeout_s = len(documents) + 2, 120.0 + 30 * len(sequences)
    stock, ours = folder / "stock.jsonl", folder / "ours.jsonl"
    words = recipe.words
    train(recipe.grid, stock, recipe=words, iterations=iterations, timeout_s=timeout_s)
    train(
        recipe.grid,
        ours,
        *("--malleus", "--malleus-sidecar", "none", "--malleus-require", "reshape"),
        *("--malleus-plan-schedule", write_json(folder / "schedule.json", schedule)),
        *("--malleus-log-dir", folder),
        recipe=words,
        iterations=iterations,
        timeout_s=timeout_s,
    )
    assert_same_training(ours, stock, relative=recipe.relative)
    events = read_lines(folder / "events.jsonl")
    assert not [event["message"] for event in events if event["event"] == "warning"]
    for event in events:
        if event["event"] == "migration":
            assert event["received_bytes"] == event["needed_bytes"]
    generations = [event["generation"] for event in events if event["event"] == "iteration"]
    in_force = [with_ascending_tp_ranks(plan) for plan in (nominal, *plans)]
    assert generations[-1] == sum(a != b for a, b in itertools.pairwise(in_force))
