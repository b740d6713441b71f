"""`malleus whatif` of our own jobs' traces: the planner is asked; uneven plans have an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from malleus_megatron.cli.main import main
from malleus_megatron.config import Level
from malleus_megatron.control.policy import Policy
from malleus_megatron.control.values import Freedom, JobDescription
from malleus_megatron.plan.cluster import Cluster
from malleus_megatron.plan.nominal import nominal_plan
from malleus_megatron.plan.plan import Plan
from malleus_megatron.sidecar.protocol import encode, job_to_json, observation_to_json
from malleus_megatron.whatif.joining import Joined
from malleus_megatron.whatif.trace_folder import JOB, OBSERVATION, StepFile, write_step
from tests.unit.test_outlook import observed
from tests.unit.test_whatif_uneven import PLAN, STEPS, trace_rows
from tests.unit.whatif_pipeline import Pipelines, Row, slower, write

THREE_GPUS = nominal_plan(
    num_layers=4,
    num_microbatches=9,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    data_parallel_size=3,
)


def write_trace(folder: Path, plan: Plan, rows: list[Row], rates: dict[int, float]) -> Path:
    job = JobDescription(
        nominal=THREE_GPUS,
        level=Level.reshape,
        freedom=Freedom(cluster=Cluster(gpus_per_node=(3,)), tensor_parallel_sizes=(1,)),
    )
    for step in STEPS:
        write_step(
            folder,
            StepFile(
                iteration=step,
                generation=0,
                plan=plan,
                operations=[
                    Joined(dp_rank, stage, kind, number, start_s, start_s + duration_s)
                    for dp_rank, stage, at, kind, number, start_s, duration_s in rows
                    if at == step
                ],
                documents={
                    JOB: encode(job_to_json(job, Policy())),
                    OBSERVATION: encode(observation_to_json(observed(plan, rates, step))),
                },
            ),
        )
    return folder


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    return write_trace(tmp_path, PLAN, trace_rows({(0, 1): 10.0}), {1: 10.0})


def asked(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["whatif", str(path), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_under_an_uneven_plan_the_slow_gpu_is_named_by_its_own_layer_times(
    uneven: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = asked(uneven, capsys)
    assert document["uneven"]
    [slow] = document["stragglers"]
    assert (slow["dp_rank"], slow["stage"]) == (0, 1)
    assert slow["rate"] == pytest.approx(10)
    assert document["step_time_s"] == pytest.approx(document["measured_step_time_s"])
    assert document["replan"]["rates"] == {"1": pytest.approx(10)}
    assert main(["whatif", str(uneven)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Under this uneven plan a slow GPU: worker (dp 0, stage 1; GPU 1)")
    assert "a re-plan (stages, layers, TP groups and micro-batches of " in text
    assert "at rates GPU 1 10.00" in text


@pytest.mark.parametrize("flag", ["--plot", "--perfetto"])
def test_an_uneven_plan_has_no_picture(
    uneven: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whatif", str(uneven), flag, str(uneven / "out.svg")]) == 2
    assert f"{flag} draws pipelines that are alike" in capsys.readouterr().err
    assert not (uneven / "out.svg").exists()


def test_under_an_even_plan_the_published_questions_are_answered_and_the_planner_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = Pipelines(
        num_pipelines=3,
        num_stages=1,
        num_microbatches=3,
        steps=STEPS,
        time_of=lambda kind, *_: 4.0 if kind == "forward" else 8.0,
    )
    rows = slower(healthy, 2, 0, 3.0).rows()
    document = asked(write_trace(tmp_path, THREE_GPUS, rows, {2: 3.0}), capsys)
    replan = document["replan"]
    # Nine micro-batches of 12 s over speeds of 1, 1 and 1/3, or less well in whole ones.
    assert document["slowdown"] == pytest.approx(3 / ((1 + 1 + 3) / 3))
    assert replan["measured_step_time_s"] == pytest.approx(3 * 36)
    assert replan["present_step_time_s"] == pytest.approx(3 * 36)
    assert 9 * 12 / (2 + 1 / 3) <= replan["lower_bound_s"] <= replan["replanned_step_time_s"]
    assert replan["replanned_step_time_s"] == pytest.approx(4 * 12)
    assert replan["plan"]["num_layers"] == 4


def test_of_a_foreign_trace_micro_batches_and_a_bound_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slower(Pipelines(num_stages=1, num_microbatches=4), 1, 0, 3.0)
    path = write(job.rows(), tmp_path / "trace.parquet")
    replan = asked(path, capsys)["replan"]
    assert replan["plan"] is None
    assert replan["micro_batches"] == [6, 2]
    assert replan["present_step_time_s"] == pytest.approx(36)
    assert replan["replanned_step_time_s"] == pytest.approx(18)
    assert replan["lower_bound_s"] == pytest.approx(8 * 3 / (1 + 1 / 3))
    assert main(["whatif", str(path)]) == 0
    assert "division of the same work among these workers is below 18 s" in capsys.readouterr().out


def test_a_damaged_document_is_refused(
    uneven: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sorted(uneven.rglob("*.parquet"))[-1]
    table = parquet.read_table(file)
    damaged = {**table.schema.metadata, b"malleus.plan": b'{"num_layers":'}
    parquet.write_table(table.replace_schema_metadata(damaged), file)
    assert main(["whatif", str(uneven)]) == 2
    assert str(file) in capsys.readouterr().err
