"""The micro-batch split against full enumeration."""

import itertools
import math
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from malleus_megatron.cost.pipeline import step_time_s
from malleus_megatron.errors import BadInputError, InfeasiblePlanError
from malleus_megatron.planner.batches import balance_microbatches

stage_times = st.one_of(
    st.floats(min_value=1e-3, max_value=10.0),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.0, 3.0]),
)
pipelines = st.lists(st.lists(stage_times, min_size=1, max_size=3), min_size=1, max_size=4)


def all_splits(num_pipelines: int, total: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), num_pipelines - 1):
        ends = (0, *cuts, total)
        yield tuple(ends[i + 1] - ends[i] for i in range(num_pipelines))


def changes(counts: tuple[int, ...], current: tuple[int, ...]) -> int:
    return sum(abs(new - old) for new, old in zip(counts, current, strict=True))


@settings(max_examples=200, deadline=None)
@given(stages=pipelines, extra=st.integers(0, 8), data=st.data())
def test_no_split_is_faster_and_none_as_fast_changes_less(
    stages: list[list[float]], extra: int, data: st.DataObject
) -> None:
    total = len(stages) + extra
    best_s = min(step_time_s(stages, split) for split in all_splits(len(stages), total))
    current = tuple(
        data.draw(st.lists(st.integers(1, 9), min_size=len(stages), max_size=len(stages)))
    )

    for known in (None, current):
        found = balance_microbatches(stages, total, known)
        assert sum(found.counts) == total
        assert min(found.counts) >= 1
        assert found.step_time_s == best_s == step_time_s(stages, found.counts)
        assert found.lower_bound_s <= best_s

    fewest = min(
        changes(split, current)
        for split in all_splits(len(stages), total)
        if step_time_s(stages, split) == best_s
    )
    assert changes(balance_microbatches(stages, total, current).counts, current) == fewest


@settings(max_examples=100, deadline=None)
@given(stages=pipelines, extra=st.integers(0, 8), data=st.data())
def test_no_fractional_split_is_below_the_bound(
    stages: list[list[float]], extra: int, data: st.DataObject
) -> None:
    total = len(stages) + extra
    weights = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(stages), max_size=len(stages)))
    counts = [1 + extra * weight / sum(weights) for weight in weights]
    fractional_s = max(
        sum(times) + (count - 1) * max(times) for times, count in zip(stages, counts, strict=True)
    )
    assert balance_microbatches(stages, total).lower_bound_s <= fractional_s * (1 + 1e-9)


def test_the_bound_is_reached_when_fractions_are_not_needed() -> None:
    split = balance_microbatches([[1.0, 1.0], [1.0, 2.0]], 9)
    assert split.counts == (6, 3)
    assert split.step_time_s == split.lower_bound_s == 7.0


def test_equal_pipelines_get_equal_counts_and_the_first_ones_the_rest() -> None:
    assert balance_microbatches([[0.1, 0.1]] * 4, 16).counts == (4, 4, 4, 4)
    assert balance_microbatches([[0.1, 0.1]] * 4, 18).counts == (5, 5, 4, 4)


def test_counts_that_are_as_fast_as_any_stay() -> None:
    stages = [[1.0], [1.0], [4.0]]
    assert balance_microbatches(stages, 8, (2, 4, 2)).counts == (3, 4, 1)
    assert balance_microbatches(stages, 8, (3, 4, 1)).counts == (3, 4, 1)
    assert balance_microbatches(stages, 8, (4, 3, 1)).counts == (4, 3, 1)


def test_another_number_of_microbatches_than_before() -> None:
    stages = [[1.0], [3.0]]
    assert balance_microbatches(stages, 16, (6, 2)).counts == (12, 4)
    assert balance_microbatches(stages, 4, (12, 4)).counts == (3, 1)


def test_a_thousand_pipelines_and_a_hundred_thousand_microbatches_take_under_a_second() -> None:
    draw = random.Random(1)
    stages = [[0.1 * draw.choice([1, 1, 1, 2.6]) for _ in range(8)] for _ in range(1000)]
    start = time.process_time()
    split = balance_microbatches(stages, 100_000, [100] * 1000)
    seconds = time.process_time() - start
    assert sum(split.counts) == 100_000
    assert split.step_time_s - split.lower_bound_s <= 0.26 + 1e-9
    assert seconds < 1.0


def test_a_failed_gpu_cannot_be_left_out_by_counts() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"Pipeline 1, stage 0 has failed.*at least 1"):
        balance_microbatches([[0.1, 0.1], [math.inf, 0.1]], 8)


def test_fewer_microbatches_than_pipelines() -> None:
    with pytest.raises(InfeasiblePlanError, match="2 micro-batches for 3 pipelines"):
        balance_microbatches([[0.1]] * 3, 2)


@pytest.mark.parametrize(
    ("stages", "current", "message"),
    [
        ([], None, "no pipeline"),
        ([[0.1], []], None, "Pipeline 1 has no stage"),
        ([[0.1, math.nan]], None, "Pipeline 0, stage 1: nan s"),
        ([[-0.5]], None, "Pipeline 0, stage 0: -0.5 s"),
        ([[0.1], [0.1]], (8,), "1 current counts for 2 pipelines"),
        ([[0.1], [0.1]], (8, 0), r"Current micro-batches \[8, 0\]"),
    ],
)
def test_bad_input_is_named(
    stages: list[list[float]], current: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        balance_microbatches(stages, 8, current)
