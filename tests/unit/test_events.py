"""events.jsonl: every line is JSON, whole, and there at once."""

import json
import math
import shutil
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron import events
from malleus_megatron.errors import BadInputError
from malleus_megatron.events import EventLog

numbers = st.floats() | st.integers() | st.booleans() | st.none() | st.text()


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "events.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_events_stand_in_their_order_and_are_there_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    log = EventLog(folder)
    log.write("iteration", 7, step_time_s=0.91, loss=5.177557, generation=2, plan="sha256:ab")
    assert lines(folder) == [
        {
            "event": "iteration",
            "iteration": 7,
            "step_time_s": 0.91,
            "loss": 5.177557,
            "generation": 2,
            "plan": "sha256:ab",
        }
    ]
    log.write("rates", 8, rates={3: 2.57, 4: math.inf})
    assert lines(folder)[1] == {"event": "rates", "iteration": 8, "rates": {"3": 2.57, "4": "inf"}}
    log.close()


def test_loss_and_norm_keep_their_full_precision(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("iteration", 1, loss=5.17755698421, grad_norm=0.1 + 0.2)
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"]) == (5.17755698421, 0.1 + 0.2)


@given(values=st.dictionaries(st.integers(0, 9), numbers), bare=st.floats())
def test_whatever_is_measured_every_line_is_json(
    tmp_path_factory: pytest.TempPathFactory, values: dict[int, Any], bare: float
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log = EventLog(folder)
    log.write("rates", 1, rates=values, inner=[(bare,)], loss=bare)
    log.close()
    (line,) = lines(folder)
    shown = bare if math.isfinite(bare) else str(bare)
    assert line["loss"] == shown
    assert line["inner"] == [[shown]]
    assert line["rates"].keys() == {str(gpu) for gpu in values}


def test_a_restarted_job_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for iteration in (1, 2):
        log = EventLog(tmp_path)
        log.write("iteration", iteration)
        log.close()
    assert [line["iteration"] for line in lines(tmp_path)] == [1, 2]


def test_a_value_that_is_no_json_leaves_no_half_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    with pytest.raises(TypeError):
        log.write("warning", 1, first=1.0, message=object())
    log.write("iteration", 2)
    assert [line["iteration"] for line in lines(tmp_path)] == [2]


def test_without_a_folder_and_after_closing_nothing_is_written(tmp_path: Path) -> None:
    EventLog(None).write("iteration", 1)
    log = EventLog(tmp_path)
    log.close()
    log.close()
    log.write("iteration", 1)
    assert lines(tmp_path) == []


def test_a_full_disk_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path)
    log.write("iteration", 1)
    assert log.failure is not None
    assert "Events are no longer written" in log.failure
    assert "No space left" in log.failure
    log.failure = None
    for iteration in range(2, 500):
        log.write("iteration", iteration)
    assert (log.failure, log.news) == (None, None)
    log.keep("plans/generation-1.json", "{}")
    log.close()
    assert not (tmp_path / "plans").exists()


def test_after_a_hiccup_the_log_goes_on_and_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(tmp_path)
    for iteration in range(7, 10):
        log.write("iteration", iteration)
    log.keep("plans/generation-1.json", "{}")
    path.unlink()
    for iteration in range(10, 110):
        log.write("iteration", iteration)
    assert [line["iteration"] for line in lines(tmp_path)] == [107, 107, 108, 109]
    gap = {"event": "missing", "iteration": 107, "since": 7, "lines": 100}
    assert lines(tmp_path)[0] == gap
    assert log.news is not None
    assert "100 lines from iteration 7 on are missing" in log.news
    assert (tmp_path / "plans" / "generation-1.json").read_text() == "{}"


@pytest.mark.parametrize("remove", [shutil.rmtree, lambda folder: folder.rename(f"{folder}.1")])
def test_a_folder_that_is_moved_or_removed_is_made_again(
    tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    """By one who rotates logs, or tidies up."""
    folder = tmp_path / "log"
    log = EventLog(folder)
    log.write("iteration", 1)
    remove(folder)
    for iteration in range(2, 205):
        log.write("iteration", iteration)
    assert [line["iteration"] for line in lines(folder)] == list(range(100, 205))
    assert log.failure is None
    assert log.news is not None
    assert "was moved or removed: events go into a new one" in log.news


def test_what_is_missing_at_the_end_is_said(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(tmp_path)
    for iteration in (7, 8, 9):
        log.write("iteration", iteration)
    path.unlink()
    log.close()
    assert lines(tmp_path) == [{"event": "missing", "iteration": 9, "since": 7, "lines": 3}]


def test_half_a_line_is_not_joined_to_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "iteration", "itera')
    log = EventLog(tmp_path)
    log.write("iteration", 2)
    log.write("iteration", 3)
    first, *others = path.read_text().splitlines()
    assert first == '{"event": "iteration", "itera'
    assert [json.loads(line)["iteration"] for line in others] == [2, 3]


def test_a_write_that_stops_in_the_middle_leaves_later_lines_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(FileIO):
        """Has room for some bytes only."""

        def write(self, data: Any) -> int:
            if self.tell() >= 20:
                raise OSError("No space left on device")
            return super().write(bytes(data)[:20])

    monkeypatch.setattr(events, "FileIO", Small)
    log = EventLog(tmp_path)
    log.write("iteration", 1)
    assert log.failure is not None
    monkeypatch.undo()
    log.write("iteration", 101)
    first, *others = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(first) == 20
    assert [json.loads(line)["event"] for line in others] == ["missing", "iteration"]


def test_plans_that_cannot_be_kept_are_told_once_and_events_go_on(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("")
    log = EventLog(tmp_path)
    log.keep("plans/generation-1.json", "{}")
    assert log.failure is not None
    assert "Plans are no longer kept" in log.failure
    log.failure = None
    log.keep("plans/generation-2.json", "{}")
    log.write("iteration", 1)
    assert log.failure is None
    assert len(lines(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="Cannot write events to"):
        EventLog(tmp_path / "file" / "log")


def test_plans_are_kept_beside_the_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.keep("plans/generation-1.json", "{}")
    assert (tmp_path / "plans" / "generation-1.json").read_text() == "{}"


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_follower_hears_what_is_written(tmp_path: Path, has_folder: bool) -> None:
    log = EventLog(tmp_path if has_folder else None)
    heard: list[dict[str, Any]] = []
    log.follower = heard.append
    log.write("rates", 1, rates={3: math.inf})
    assert heard == [{"event": "rates", "iteration": 1, "rates": {"3": "inf"}}]
    assert not has_folder or lines(tmp_path) == heard
