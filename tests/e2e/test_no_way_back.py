"""A job that cannot go back to its recipe's stages says what is not done for want of them."""

from pathlib import Path

import pytest

from tests.harness.plans import plan_of
from tests.harness.ranks import run_script
from tests.harness.recipes import LLAMA, Recipe
from tests.harness.reshaping import UNDER_PLANS, events_of, write_plans
from tests.harness.training import Grid

pytestmark = pytest.mark.e2e


def test_a_save_and_an_end_that_need_the_recipes_stages_are_told(tmp_path: Path) -> None:
    grid = Grid(pipelines=1, stages=2)
    recipe = Recipe(name="no way back", grid=grid, flags=LLAMA)
    plans = {2: plan_of((8, [((0,), 1), ((1,), 3)]))}
    saved = tmp_path / "checkpoints"
    ranks = run_script(
        grid.world,
        [
            *("-m", "tests.e2e.no_way_back", *recipe.words, *grid.flags, "--train-iters", "3"),
            *("--save", saved, "--save-interval", "2", "--ckpt-format", "torch"),
            *(*UNDER_PLANS, "--malleus-plan-schedule", write_plans(tmp_path, plans)),
            *("--malleus-log-dir", tmp_path),
        ],
        expect_exit=2,
    )
    why = "going back failed on rank 1: RuntimeError: it fails here"
    (warning,) = [event["message"] for event in events_of(tmp_path, "warning")]
    assert warning.startswith("Nothing was saved for iteration 2: ")
    assert warning.endswith(why)
    assert "--ckpt-format torch_dist" in warning
    assert not (saved / "latest_checkpointed_iteration.txt").exists()
    messages = [
        line for rank in ranks for line in rank.output.splitlines() if "All iterations" in line
    ]
    assert len(messages) == 1, "all ranks share the end, and one tells it"
    assert messages[0].endswith(why)
    assert len(events_of(tmp_path, "iteration")) == 3
    assert not any("Traceback" in rank.output for rank in ranks)
