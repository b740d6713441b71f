"""What-if analysis under an uneven plan, of pipelines whose every time is known."""

from dataclasses import replace

import numpy as np
import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.plan import Pipeline, Plan, Stage
from malleus_megatron.whatif.uneven import analyse_uneven, is_uneven
from malleus_megatron.whatif.uneven_report import uneven_to_json, uneven_to_text
from tests.unit.whatif_pipeline import Pipelines, Row, to_rows

PLAN = Plan(
    num_layers=4,
    num_microbatches=8,
    pipelines=(
        Pipeline(
            num_microbatches=3,
            stages=(Stage(gpus=(0,), layers=(0, 3)), Stage(gpus=(1,), layers=(3, 4))),
        ),
        Pipeline(num_microbatches=5, stages=(Stage(gpus=(2,), layers=(0, 4)),)),
    ),
)
SLOW = {(0, 1): 4.0}
STEPS = (10, 20, 30)
GRADS_S = 0.5


def pipeline_rows(dp_rank: int, rates: dict[tuple[int, int], float], count: int) -> list[Row]:
    """Of one pipeline of the plan: a layer takes 1 s forward and 2 s backward."""
    stages = PLAN.pipelines[dp_rank].stages

    def time_of(kind: str, step: int, own: int, stage: int, microbatch: int) -> float:
        time_s = stages[stage].num_layers * (1.0 if kind == "forward" else 2.0)
        return time_s * rates.get((dp_rank, stage), 1.0)

    job = Pipelines(
        num_pipelines=1,
        num_stages=len(stages),
        num_microbatches=count,
        steps=STEPS,
        time_of=time_of,
        transfer_s=0.1,
    )
    return [(dp_rank, *row[1:]) for row in job.rows()]


def trace_rows(rates: dict[tuple[int, int], float]) -> list[Row]:
    """Both pipelines, and a gradient sum in which all workers wait for the last one."""
    rows = pipeline_rows(0, rates, 3) + pipeline_rows(1, rates, 5)
    ends: dict[tuple[int, int, int], float] = {}
    for dp_rank, stage, step, _, _, start_s, duration_s in rows:
        worker = dp_rank, stage, step
        ends[worker] = max(ends.get(worker, 0.0), start_s + duration_s)
    for (dp_rank, stage, step), own_s in ends.items():
        last_s = max(end for (_, _, other), end in ends.items() if other == step)
        duration_s = last_s + GRADS_S - own_s
        rows.append((dp_rank, stage, step, "grads-reduce-scatter", 0, own_s, duration_s))
    return rows


def step_s(rates: dict[tuple[int, int], float]) -> float:
    rows = [row for row in trace_rows(rates) if row[2] == STEPS[0]]
    return max(row[5] + row[6] for row in rows)


def test_unlike_layers_counts_or_degrees_make_a_plan_uneven() -> None:
    assert is_uneven(PLAN)
    one = PLAN.pipelines[0]
    alike = replace(PLAN, num_microbatches=6, pipelines=(one, _on_gpus(one, 2)))
    assert not is_uneven(alike)
    more = replace(_on_gpus(one, 2), num_microbatches=5)
    assert is_uneven(replace(alike, num_microbatches=8, pipelines=(one, more)))


def _on_gpus(pipeline: Pipeline, first: int) -> Pipeline:
    stages = tuple(
        replace(stage, gpus=(first + number,)) for number, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=stages)


def test_a_replay_with_the_real_times_is_the_trace() -> None:
    found = analyse_uneven(to_rows(trace_rows(SLOW)), PLAN, SLOW)
    assert found.steps == STEPS
    assert found.step_time_s == pytest.approx(found.measured_step_time_s)
    assert found.step_time_s == pytest.approx(step_s(SLOW))
    # Five micro-batches of 4 x 3 s, and the sum.
    assert found.pipeline_times_s[1] == pytest.approx(60 + GRADS_S)


def test_the_ideal_is_the_same_plan_on_healthy_gpus() -> None:
    found = analyse_uneven(to_rows(trace_rows(SLOW)), PLAN, SLOW)
    assert found.ideal_step_time_s == pytest.approx(step_s({}))


def test_the_slow_worker_is_named_and_explains_the_loss() -> None:
    rates = {(0, 1): 10.0}
    found = analyse_uneven(to_rows(trace_rows(rates)), PLAN, rates)
    assert found.slowdown == pytest.approx(step_s(rates) / step_s({}))
    assert found.stragglers == [((0, 1), 10.0)]
    assert max(found.by_worker, key=lambda worker: found.by_worker[worker]) == (0, 1)
    assert found.by_worker[0, 1] == pytest.approx(found.slowdown)
    assert found.by_worker[1, 0] == pytest.approx(1)
    assert found.m_w == pytest.approx(1)
    document = uneven_to_json(found)
    assert document["diagnosis"].startswith("Under this uneven plan a slow GPU: worker (dp 0, ")
    assert document["by_worker"][0]["slowdown"] == pytest.approx(found.slowdown)
    assert "10.00" in uneven_to_text(found)


def test_a_straggler_that_the_plan_has_room_for_costs_nothing() -> None:
    """At rate 4 pipeline 0 still ends before pipeline 1."""
    found = analyse_uneven(to_rows(trace_rows(SLOW)), PLAN, SLOW)
    assert found.slowdown == pytest.approx(1)
    assert [worker for worker, _ in found.stragglers] == [(0, 1)]
    assert (found.m_w, found.m_s) == (0, 0)
    assert "no slow GPU holds the job up" in uneven_to_text(found)
    assert "pipeline 1 ends last" in uneven_to_text(found)


def test_more_layers_are_no_slower_gpu() -> None:
    found = analyse_uneven(to_rows(trace_rows({})), PLAN, {})
    assert found.slowdown == pytest.approx(1)
    assert not found.stragglers
    assert list(found.stage_times_s[0]) == pytest.approx([9, 3])
    assert list(found.stage_times_s[1]) == pytest.approx([12])


def test_a_step_with_a_hole_in_one_pipeline_is_left_out() -> None:
    rows = trace_rows({})
    hole = next(row for row in rows if row[0] == 1 and row[2] == 20)
    rows.remove(hole)
    found = analyse_uneven(to_rows(rows), PLAN, {})
    assert found.steps == (10, 30)
    [skip] = found.skipped
    assert (skip.step, skip.reason.startswith("pipeline 1: ")) == (20, True)


def test_a_trace_of_another_plan_is_refused() -> None:
    rows = to_rows(pipeline_rows(0, {}, 3))
    with pytest.raises(BadInputError, match="2 pipelines"):
        analyse_uneven(rows, PLAN, {})


def test_the_document_is_plain_json() -> None:
    import json

    found = uneven_to_json(analyse_uneven(to_rows(trace_rows(SLOW)), PLAN, SLOW))
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["num_steps"] == 3
    assert np.isfinite(again["slowdown"])
