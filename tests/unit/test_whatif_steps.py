"""Which steps of a trace are left out and why, and traces that cannot be analysed."""

import math

import numpy as np
import pytest

from malleus_megatron.errors import BadInputError
from malleus_megatron.whatif.analysis import analyse
from tests.unit.whatif_pipeline import Pipelines, Row, slower, to_rows

JOB = Pipelines(num_pipelines=3, num_stages=2, num_microbatches=2, transfer_s=0.1, grads_s=0.2)
ROWS = JOB.rows()
FORWARD = "forward-compute"


def find(rows: list[Row], dp_rank: int, stage: int, step: int, kind: str, number: int = 0) -> int:
    return [row[:5] for row in rows].index((dp_rank, stage, step, kind, number))


def changed(place: int, **values: float) -> list[Row]:
    """The rows with one of them changed."""
    names = ("dp_rank", "stage", "step", "kind", "number", "start", "duration")
    row = tuple(values.get(name, value) for name, value in zip(names, ROWS[place], strict=True))
    return [*ROWS[:place], row, *ROWS[place + 1 :]]  # type: ignore[list-item]


def test_a_whole_trace_loses_no_step() -> None:
    trace = analyse(to_rows(ROWS)).what_if.trace
    assert trace.steps == (10, 20, 30)
    assert not trace.skipped


def test_a_step_that_lacks_an_operation_is_left_out_and_the_others_stay() -> None:
    place = find(ROWS, 2, 1, 20, FORWARD, 1)
    trace = analyse(to_rows(ROWS[:place] + ROWS[place + 1 :])).what_if.trace
    assert trace.steps == (10, 30)
    [skip] = trace.skipped
    assert skip.step == 20
    assert skip.reason == (
        "1 of 54 operations are missing, first forward-compute 1 of stage 1, dp rank 2"
    )


def test_the_result_without_a_step_is_that_of_the_other_steps() -> None:
    rows = slower(JOB, 1, 1, 2.0).rows()
    place = find(rows, 0, 0, 10, "forward-send", 1)
    other_steps = [row for row in rows if row[2] != 10]
    holed = analyse(to_rows(rows[:place] + rows[place + 1 :]))
    assert holed.what_if.slowdown == analyse(to_rows(other_steps)).what_if.slowdown


def test_a_trace_that_ends_within_a_step_loses_that_step() -> None:
    trace = analyse(to_rows(ROWS[:-20])).what_if.trace
    assert trace.steps == (10, 20)
    assert [skip.step for skip in trace.skipped] == [30]


def test_a_worker_that_is_missing_in_one_step_costs_that_step() -> None:
    rows = [row for row in ROWS if row[:3] != (1, 0, 30)]
    trace = analyse(to_rows(rows)).what_if.trace
    assert trace.steps == (10, 20)
    assert "dp rank 1" in trace.skipped[0].reason


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"duration": math.nan}, "is no time"),
        ({"duration": -0.5}, "is no time"),
        ({"start": math.inf}, "is no time"),
        ({"duration": math.inf}, "is no time"),
        ({"dp_rank": 77}, "not in most other steps"),
        ({"stage": 9}, "not in most other steps"),
        ({"number": 1}, "recorded twice"),
        ({"start": 5.0}, "before"),
        ({"duration": 8.0}, "before"),
    ],
)
def test_one_damaged_row_costs_its_step_alone(values: dict[str, float], said: str) -> None:
    rows = changed(find(ROWS, 0, 1, 20, FORWARD), **values)
    trace = analyse(to_rows(rows)).what_if.trace
    assert trace.steps == (10, 30)
    assert said in trace.skipped[0].reason


def test_a_step_that_would_outweigh_all_others_is_left_out() -> None:
    rows = changed(find(ROWS, 0, 1, 20, "grads-reduce-scatter"), duration=1e30)
    trace = analyse(to_rows(rows)).what_if.trace
    assert trace.steps == (10, 30)
    assert "median step" in trace.skipped[0].reason


def test_operations_are_told_apart_however_large_their_numbers_are() -> None:
    rows = changed(find(ROWS, 0, 1, 20, FORWARD), number=2**62, step=20)
    assert analyse(to_rows(rows)).what_if.trace.steps == (10, 30)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no rows"),
        ([(*row[:3], row[3].replace("compute", "dance"), *row[4:]) for row in ROWS], "dance"),
        ([row for row in ROWS if row[3] != "backward-compute"], "no backward-compute"),
        ([row for row in ROWS if row[0] != 1], "dp_rank 1 is missing"),
        ([row for row in ROWS if row[1] != 0], "stage 0 of 2"),
        ([row for row in ROWS if row[3] != "forward-recv"], "0 forward-recv"),
        ([row for row in ROWS if row[:4] != (0, 1, row[2], FORWARD)], "none of its 3 steps"),
        ([(*row[:4], row[4] + 1, *row[5:]) for row in ROWS], "count all 2 from 0"),
        ([(*row[:5], 0.0, 0.0) for row in ROWS], "takes any time"),
        ([(*row[:6], 100 * row[6]) for row in ROWS], "none of its 3 steps"),
    ],
)
def test_what_is_no_trace_of_a_pipeline_is_refused_with_the_reason(
    rows: list[Row], said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        analyse(to_rows(rows) if rows else _nothing())


def _nothing():
    rows = to_rows(ROWS)
    empty = {name: getattr(rows, name)[:0] for name in ("dp_rank", "stage", "step", "kind")}
    columns = {name: getattr(rows, name)[:0] for name in ("number", "chunk", "start_s")}
    return type(rows)(kinds=rows.kinds, duration_s=rows.duration_s[:0], **empty, **columns)


def test_operations_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    # Stage 0 seems to compute a gradient before the forward that it belongs to.
    times = {FORWARD: 50.0, "backward-compute": 0.0}
    rows = [
        (*row[:5], times[row[3]] + row[4], 0.5) if row[1] == 0 and row[3] in times else row
        for row in ROWS
    ]
    with pytest.raises(BadInputError, match="in a circle"):
        analyse(to_rows(rows))


def test_an_interleaved_schedule_is_refused() -> None:
    rows = to_rows(ROWS)
    columns = {
        name: getattr(rows, name)
        for name in ("dp_rank", "stage", "step", "kind", "number", "start_s", "duration_s")
    }
    with pytest.raises(BadInputError, match="interleaved"):
        type(rows)(kinds=rows.kinds, chunk=np.arange(len(ROWS)) % 2, **columns)
