"""The plan beside a checkpoint: whole or not there, and behind what the user asks for."""

import random
from pathlib import Path

import pytest

from malleus_megatron.adapter.inputs import Inputs
from malleus_megatron.adapter.plan_file import FILE_NAME, is_last_save, keep_plan, kept_plan
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Plan
from malleus_megatron.plan.schedule import PlanSchedule
from tests.harness.recipes import random_job_plan
from tests.harness.training import Grid

GRID = Grid(pipelines=2, tp=2)


def some_plan(seed: int) -> Plan:
    return random_job_plan(random.Random(seed), GRID, (1, 2))


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    assert kept_plan(tmp_path) is None
    for seed in range(3):
        assert keep_plan(some_plan(seed), tmp_path) is None
        assert kept_plan(tmp_path) == some_plan(seed)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_nominal_save_takes_the_plan_of_an_earlier_one_away(tmp_path: Path) -> None:
    assert keep_plan(None, tmp_path) is None
    keep_plan(some_plan(0), tmp_path)
    assert keep_plan(None, tmp_path) is None
    assert kept_plan(tmp_path) is None


def test_half_a_plan_is_never_taken(tmp_path: Path) -> None:
    keep_plan(some_plan(0), tmp_path)
    text = (tmp_path / FILE_NAME).read_text(encoding="utf-8")
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / f"{FILE_NAME}.unfinished").write_text(text[: len(text) // 2], encoding="utf-8")
    assert kept_plan(tmp_path) is None
    (tmp_path / FILE_NAME).write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(BadInputError, match=FILE_NAME):
        kept_plan(tmp_path)


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    assert "No such file" in str(keep_plan(some_plan(0), tmp_path / "gone"))


def test_the_last_save_of_a_folder_is_known_by_megatrons_own_file(tmp_path: Path) -> None:
    assert not is_last_save(tmp_path, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n", encoding="utf-8")
    assert is_last_save(tmp_path, 4)
    assert not is_last_save(tmp_path, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")
    assert not is_last_save(tmp_path, 4)


def test_what_the_user_asks_for_goes_before_the_checkpoints_plan() -> None:
    def first_plan(start: Plan | None, schedule: PlanSchedule) -> Plan | None:
        inputs = Inputs(
            start_plan=start, schedule=schedule, injection=None, pace=None, resumed_plan=kept
        )
        assert inputs.plan_at(8, first=False) is None
        return inputs.plan_at(7, first=True)

    kept, asked, scheduled = (some_plan(seed) for seed in range(3))
    assert first_plan(None, PlanSchedule()) == kept
    assert first_plan(asked, PlanSchedule()) == asked
    assert first_plan(asked, PlanSchedule(entries=((5, scheduled),))) == scheduled
    assert first_plan(None, PlanSchedule(entries=((9, scheduled),))) == kept
