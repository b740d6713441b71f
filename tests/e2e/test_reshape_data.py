"""Reshaped jobs read stock's samples and evaluate as the stock job does."""

import re
from pathlib import Path

import pytest

from malleus_megatron.plan.plan import Plan
from tests.harness.plans import plan_of
from tests.harness.ranks import RankOutcome, run_script
from tests.harness.reshaping import UNDER_PLANS, write_plans
from tests.harness.training import (
    TINY_GPT,
    Grid,
    assert_same_training,
    read_lines,
    train,
)

pytestmark = pytest.mark.e2e

FP32 = 1e-6
GRID = Grid(pipelines=2, tp=2)
GROWING = Grid(pipelines=2, tp=2, growth="0:8 768:16")
WITH_DATA = tuple(word for word in TINY_GPT if word != "--mock-data")
UNLIKE = plan_of((3, [((3,), 1), ((0,), 3)]), (5, [((1, 2), 4)]))
THREE = plan_of((2, [((2,), 4)]), (1, [((0,), 4)]), (5, [((1,), 4)]), standby=(3,))
ONE = plan_of((8, [((1,), 2), ((2, 3), 2), ((0,), 0)]))


def under(schedule: Path, folder: Path) -> list[str]:
    return [
        *UNDER_PLANS,
        *("--malleus-plan-schedule", str(schedule), "--malleus-log-dir", str(folder)),
    ]


def validation_losses(ranks: list[RankOutcome]) -> list[float]:
    """What the last rank prints, in seven digits."""
    found = re.findall(r"validation loss at iteration \d+ .*?value: (\S+)", ranks[-1].output)
    return [float(value) for value in found]


@pytest.fixture(scope="module")
def two_corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prefixes of two small tokenised texts."""
    from malleus_megatron.adapter.text_data import prepare_text_data

    folder = tmp_path_factory.mktemp("corpora")
    prefixes = []
    for name, times in (("first", 3), ("second", 7)):
        texts = folder / name
        texts.mkdir()
        for number in range(4):
            words = f"{name} text number {number} " * (20 * times + number)
            (texts / f"{number}.txt").write_text(words, encoding="utf-8")
        prepare_text_data(texts, folder / f"{name}-data", patterns=("*.txt",))
        prefixes.append(str(folder / f"{name}-data"))
    return prefixes


PLANS = {2: UNLIKE, 4: THREE, 5: ONE}
CASES: dict[str, tuple[Grid, dict[int, Plan], tuple[str, ...]]] = {
    "from the start": (GRID, {1: THREE, 3: UNLIKE}, ()),
    "cyclic": (GRID, PLANS, ("--dataloader-type", "cyclic")),
    "cyclic, not sharded": (
        GRID,
        PLANS,
        ("--dataloader-type", "cyclic", "--no-data-sharding"),
    ),
    "data workers": (GRID, PLANS, ("--num-workers", "1")),
    "batch size grows": (GROWING, PLANS, ()),
    "rerun machine": (GRID, PLANS, ("--rerun-mode", "validate_results")),
    "all timers": (GRID, PLANS, ("--timing-log-level", "2", "--log-num-zeros-in-grad")),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_are_stocks(name: str, tmp_path: Path) -> None:
    grid, plans, flags = CASES[name]
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    train(grid, stock, *flags, iterations=6)
    schedule = write_plans(tmp_path, plans)
    train(grid, ours, *flags, *under(schedule, tmp_path), iterations=6)
    assert_same_training(ours, stock, relative=FP32)
    events = read_lines(tmp_path / "events.jsonl")
    assert not [event for event in events if event["event"] == "warning"]
    assert sum(event["event"] == "plan" for event in events) == len(plans)


def test_blended_data_is_read_across_epochs_and_evaluated(
    two_corpora: list[str], tmp_path: Path
) -> None:
    data = ("--data-path", "0.3", two_corpora[0], "0.7", two_corpora[1], "--split", "80,20,0")
    flags = (*data, "--eval-iters", "3", "--eval-interval", "2", "--vocab-size", "257")
    stock, ours = tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"
    expected = validation_losses(train(GRID, stock, *flags, iterations=8, recipe=WITH_DATA))
    schedule = write_plans(tmp_path, PLANS | {7: UNLIKE})
    plans = under(schedule, tmp_path)
    found = validation_losses(train(GRID, ours, *flags, *plans, iterations=8, recipe=WITH_DATA))
    assert_same_training(ours, stock, relative=FP32)
    assert len(expected) > 3
    assert found == pytest.approx(expected, rel=2e-6)


SCRIPT_WITH_OWN_DATA = """
import torch
import malleus_megatron.adapter.gpt_data as gpt_data
from malleus_megatron.pretrain_gpt import main

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        tokens = (torch.arange(33) * (index + 3)) % 127
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "attention_mask": torch.ones(1, 32, 32).triu(1) > 0,
            "loss_mask": torch.ones(32),
            "position_ids": torch.arange(32),
        }

# Without is_distributed Megatron asks the first rank of each TP group only.
gpt_data.datasets_provider = lambda num_samples, vp_stage=None: (Samples(), None, None)
main()
"""


def test_a_script_whose_data_is_built_on_few_ranks_is_rebalanced(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_WITH_OWN_DATA, encoding="utf-8")
    schedule = write_plans(tmp_path, {3: UNLIKE})
    run_script(
        GRID.world,
        [
            script,
            *(*TINY_GPT, *GRID.flags, "--train-iters", "4", "--malleus"),
            *("--malleus-sidecar", "none", "--malleus-log-dir", str(tmp_path)),
            *("--malleus-plan-schedule", str(schedule)),
        ],
    )
    events = read_lines(tmp_path / "events.jsonl")
    levels = [event["level"] for event in events if event["event"] == "level"]
    assert levels == ["reshape", "rebalance"]
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert len(warnings) == 1
    assert "level reshape" in warnings[0]
    assert sum(event["event"] == "iteration" for event in events) == 4
