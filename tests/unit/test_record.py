"""The recorder: one line an iteration, in full precision, from the rank that holds the loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from malleus_megatron.adapter import record
from malleus_megatron.errors import BadInputError


def step(losses: dict[str, float], *, skipped: int = 0, grad_norm: float | None = 1.5) -> Any:
    def train_step(*arguments: Any, iteration: int | None = None) -> tuple[Any, ...]:
        return losses, skipped, False, False, 0, grad_norm, None, 0

    return train_step


def recorded(path: Path, train_step: Any) -> Any:
    return record.recorder_row(path).make(train_step)


@pytest.fixture(autouse=True)
def holds_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_is_first_holder_of_the_loss", lambda: True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_digit_is_kept_and_iterations_count_from_1(tmp_path: Path):
    path = tmp_path / "new" / "losses.jsonl"
    loss = 1 / 3
    run = recorded(path, step({"lm loss": loss, "mtp loss": 9.0}))
    result = run(*range(7), iteration=0)
    run(*range(7), 4)
    assert result[0] == {"lm loss": loss, "mtp loss": 9.0}
    common = {"event": "iteration", "loss": loss, "grad_norm": 1.5, "skipped": False}
    assert lines(path) == [common | {"iteration": 1}, common | {"iteration": 5}]


def test_what_json_has_no_number_for_is_text_and_a_missing_norm_is_null(tmp_path: Path):
    path = tmp_path / "losses.jsonl"
    recorded(path, step({"lm loss": math.nan}, skipped=1, grad_norm=math.inf))(iteration=0)
    recorded(path, step({"lm loss": 1.0}, grad_norm=None))(iteration=1)
    first, second = lines(path)
    assert (first["loss"], first["grad_norm"], first["skipped"]) == ("nan", "inf", True)
    assert second["grad_norm"] is None


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_disk_that_fails_is_told_once_and_ends_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
):
    path = Path("/dev/full") if fault == "full" else tmp_path / "folder" / "losses.jsonl"
    run = recorded(path, step({"lm loss": 1.0}))
    if fault == "gone":
        path.parent.rmdir()
    for iteration in range(3):
        assert run(iteration=iteration)[0] == {"lm loss": 1.0}
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert "from iteration 1 on" in warning
    assert str(path) in warning


def test_ranks_without_the_loss_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "losses.jsonl"
    recorded(path, step({}))(iteration=0)
    monkeypatch.setattr(record, "_is_first_holder_of_the_loss", lambda: False)
    recorded(path, step({"lm loss": 1.0}))(iteration=0)
    assert not path.exists()


def test_a_file_that_cannot_be_made_is_bad_input(tmp_path: Path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BadInputError, match="--malleus-record"):
        record.recorder_row(tmp_path / "file" / "losses.jsonl")


def test_a_folder_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is a folder"):
        record.recorder_row(tmp_path)
