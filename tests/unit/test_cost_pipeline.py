"""The closed form against the 1F1B schedule, played out."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from malleus_megatron.cost.pipeline import pipeline_time_s, step_time_s

times_s = st.floats(min_value=0.0, max_value=10.0)
stages_s = st.lists(times_s, min_size=1, max_size=5)
counts = st.integers(1, 12)


def one_f_one_b_s(stages: list[float], num_microbatches: int, forward_share: float) -> float:
    """Play the schedule: stage j starts with S - j - 1 forwards, then one forward, one backward."""
    last = len(stages) - 1
    order = [_order(last - stage, num_microbatches) for stage in range(last + 1)]
    end: dict[tuple[str, int, int], float] = {}
    busy_until = [0.0] * len(stages)
    while any(order):
        for stage, operations in enumerate(order):
            while operations and _needs(operations[0], stage, last) <= end.keys():
                kind, microbatch = operations.pop(0)
                needed = _needs((kind, microbatch), stage, last)
                start = max([busy_until[stage], *(end[name] for name in needed)])
                share = forward_share if kind == "forward" else 1 - forward_share
                busy_until[stage] = start + share * stages[stage]
                end[kind, microbatch, stage] = busy_until[stage]
    return max(busy_until)


def _order(num_later_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    warm_up = min(num_later_stages, num_microbatches)
    forwards = [("forward", m) for m in range(num_microbatches)]
    backwards = [("backward", m) for m in range(num_microbatches)]
    steady = [pair for both in zip(forwards[warm_up:], backwards, strict=False) for pair in both]
    return forwards[:warm_up] + steady + backwards[num_microbatches - warm_up :]


def _needs(operation: tuple[str, int], stage: int, last: int) -> set[tuple[str, int, int]]:
    kind, microbatch = operation
    if kind == "forward":
        return {("forward", microbatch, stage - 1)} if stage else set()
    if stage == last:
        return {("forward", microbatch, stage)}
    return {("backward", microbatch, stage + 1)}


@given(stages_s, counts, st.floats(0.1, 0.9))
@example([2.0, 1.0, 1.0, 1.0], 4, 1 / 3)
@example([3.0, 1.0], 4, 1 / 3)
def test_the_schedule_is_never_slower_and_never_below_its_bounds(
    stages: list[float], count: int, share: float
) -> None:
    played = one_f_one_b_s(stages, count, share)
    before = [sum(stages[:stage]) for stage in range(len(stages))]
    bound = max(count * time + wait for time, wait in zip(stages, before, strict=True))
    assert bound <= played + 1e-9
    assert played <= pipeline_time_s(stages, count) + 1e-9


@given(times_s, st.integers(1, 5), counts, st.floats(0.1, 0.9))
def test_equal_stages_are_predicted_exactly(
    time: float, num_stages: int, count: int, share: float
) -> None:
    stages = [time] * num_stages
    assert pipeline_time_s(stages, count) == pytest.approx(one_f_one_b_s(stages, count, share))
    assert pipeline_time_s(stages, count) == pytest.approx((count - 1 + num_stages) * time)


@given(stages_s)
def test_one_microbatch_passes_every_stage_once(stages: list[float]) -> None:
    assert pipeline_time_s(stages, 1) == pytest.approx(sum(stages))


@given(stages_s, counts)
def test_one_more_microbatch_costs_the_slowest_stage(stages: list[float], count: int) -> None:
    more = pipeline_time_s(stages, count + 1) - pipeline_time_s(stages, count)
    assert more == pytest.approx(max(stages))


@given(st.lists(st.tuples(stages_s, counts), min_size=1, max_size=4))
def test_a_step_takes_as_long_as_its_slowest_pipeline(
    pipelines: list[tuple[list[float], int]],
) -> None:
    step = step_time_s([stages for stages, _ in pipelines], [count for _, count in pipelines])
    each = [pipeline_time_s(stages, count) for stages, count in pipelines]
    assert step in each
    assert all(time <= step for time in each)


def test_counts_must_fit_the_pipelines() -> None:
    with pytest.raises(ValueError, match="zip"):
        step_time_s([[1.0], [1.0]], [3])
