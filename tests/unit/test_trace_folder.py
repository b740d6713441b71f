"""The files of a job's own traces: whole or not there, and read generation by generation."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from malleus_megatron.cli.main import main
from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.codec import plan_from_json
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.whatif.analysis import analyse
from malleus_megatron.whatif.joining import Joined
from malleus_megatron.whatif.trace_file import read_trace
from malleus_megatron.whatif.trace_folder import (
    PLAN,
    StepFile,
    other_generations,
    read_documents,
    trace_files,
    write_step,
)
from tests.unit.whatif_pipeline import Pipelines, slower, to_rows

JOB_OF_THREE = slower(Pipelines(num_pipelines=3, num_stages=2, transfer_s=0.1), 2, 1, 2.0)
PLAN_OF_THREE = nominal_plan(
    num_layers=4,
    num_microbatches=12,
    tensor_parallel_size=1,
    pipeline_parallel_size=2,
    data_parallel_size=3,
)


def traced(iteration: int, generation: int = 0) -> StepFile:
    rows = replace(JOB_OF_THREE, steps=(iteration,)).rows()
    return StepFile(
        iteration=iteration,
        generation=generation,
        plan=PLAN_OF_THREE,
        operations=[
            Joined(dp_rank, stage, kind, number, start_s, start_s + duration_s)
            for dp_rank, stage, _, kind, number, start_s, duration_s in rows
        ],
        documents={"other": b'{"a": 1}'},
    )


def test_a_folder_is_read_as_one_file_would_be(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        write_step(tmp_path, traced(iteration))
    found, same = analyse(read_trace(tmp_path)), analyse(to_rows(JOB_OF_THREE.rows()))
    assert found.what_if.trace.steps == (10, 20, 30)
    assert found.what_if.slowdown == pytest.approx(same.what_if.slowdown)
    assert found.diagnosis == same.diagnosis


def test_the_generation_with_the_most_iterations_is_read_and_the_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration, generation in ((2, 0), (4, 2), (6, 2), (8, 10)):
        write_step(tmp_path, traced(iteration, generation))
    files = trace_files(tmp_path)
    assert [file.parent.name for file in files] == ["generation-2"] * 2
    assert other_generations(tmp_path, files) == ["generation-0", "generation-10"]
    assert main(["whatif", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_steps"] == 2
    assert "generation-0, generation-10" in captured.err
    assert len(trace_files(tmp_path / "generation-10")) == 1


def test_of_generations_alike_the_last_is_read(tmp_path: Path) -> None:
    for iteration, generation in ((2, 9), (4, 10)):
        write_step(tmp_path, traced(iteration, generation))
    [file] = trace_files(tmp_path)
    assert file.parent.name == "generation-10"


def test_a_file_says_under_which_plan_it_was_recorded(tmp_path: Path) -> None:
    documents = read_documents(write_step(tmp_path, traced(4)))
    assert plan_from_json(json.loads(documents[PLAN])) == PLAN_OF_THREE
    assert documents["other"] == b'{"a": 1}'


def test_a_write_that_fails_half_way_leaves_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, traced(2))

    def fails(table: object, where: Path, **options: object) -> None:
        where.write_bytes(b"PAR1 half")
        raise OSError("disk full")

    monkeypatch.setattr(parquet, "write_table", fails)
    with pytest.raises(OSError, match="disk full"):
        write_step(tmp_path, traced(4))
    assert [file.name for file in trace_files(tmp_path)] == ["iteration-00000002.parquet"]
    assert len(list(tmp_path.rglob("*.*"))) == 1


def test_what_a_killed_job_left_unfinished_is_not_read(tmp_path: Path) -> None:
    path = write_step(tmp_path, traced(2))
    path.with_name("iteration-00000004.unfinished").write_bytes(b"PAR1 half")
    assert trace_files(tmp_path) == (path,)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no trace"):
        read_trace(tmp_path)
    assert main(["whatif", str(tmp_path)]) == 2


@pytest.mark.parametrize("name", ["trace", "generation-3"])
def test_a_folder_that_may_not_be_read_is_no_empty_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    (folder / "generation-3").mkdir(parents=True)
    scandir, listdir = os.scandir, os.listdir

    def refused(path: Any, read: Any) -> Any:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(os, "scandir", lambda path: refused(path, scandir))
    monkeypatch.setattr(os, "listdir", lambda path: refused(path, listdir))
    assert main(["whatif", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"{name}: Permission denied." in said
    assert "holds no trace" not in said
