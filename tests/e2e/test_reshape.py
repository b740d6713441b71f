"""Under any sequence of valid plans a job trains as the stock uniform job does.

A run trains one recipe through several sequences: three random plans, an iteration each, and back
to the nominal plan. MALLEUS_SEQUENCES=N runs N sequences a recipe, other ones each time.
"""

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from malleus_megatron.plan.codec import plan_to_json
from malleus_megatron.plan.plan import Plan
from tests.harness.recipes import BF16_RECIPES, RECIPES, Recipe, job_plans
from tests.harness.training import assert_same_training, read_lines, train, write_json

pytestmark = pytest.mark.e2e

PLANS_A_SEQUENCE = 3
LONG = "MALLEUS_SEQUENCES" in os.environ
SEQUENCES = int(os.environ.get("MALLEUS_SEQUENCES", "0"))

once = settings(
    max_examples=1,
    derandomize=not LONG,
    database=None,
    deadline=None,
    # A failing run takes a minute: its plans are shown as they are.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(420 + 30 * SEQUENCES)
@pytest.mark.parametrize("recipe", [*RECIPES, *BF16_RECIPES], ids=lambda recipe: recipe.name)
def test_losses_and_gradient_norms_are_stocks(recipe: Recipe, tmp_path: Path) -> None:
    plans = st.lists(
        job_plans(recipe.grid, recipe.degrees), min_size=PLANS_A_SEQUENCE, max_size=PLANS_A_SEQUENCE
    )
    number = SEQUENCES or recipe.sequences
    sequences = st.lists(plans, min_size=number, max_size=number)

    @once
    @given(sequences)
    def check(sequences: list[list[Plan]]) -> None:
        train_through(recipe, sequences, tmp_path)

    check()


def train_through(recipe: Recipe, sequences: list[list[Plan]], folder: Path) -> None:
    each = recipe.grid.num_microbatches // recipe.grid.pipelines
    nominal = recipe.grid.plan([each] * recipe.grid.pipelines)
    documents = []
    for sequence in sequences:
        documents += [*map(plan_to_json, sequence), nominal]
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
    changes = sum(a != b for a, b in itertools.pairwise([nominal, *documents]))
    assert generations[-1] == changes
