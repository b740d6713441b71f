"""Dealing micro-batches to pipelines, and keeping shares when the batch size changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.errors import BadInputError
from malleus_megatron.plan.microbatches import deal, scaled_counts

counts = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(counts)
def test_every_pipeline_gets_its_count(counts: list[int]) -> None:
    owners = deal(counts)
    assert [owners.count(pipeline) for pipeline in range(len(counts))] == counts


@given(st.integers(1, 8), st.integers(1, 20))
def test_equal_counts_are_dealt_in_megatrons_order(pipelines: int, each: int) -> None:
    owners = deal([each] * pipelines)
    assert owners == [k % pipelines for k in range(pipelines * each)]


def test_a_pipeline_with_more_takes_the_later_ones() -> None:
    assert deal([5, 3]) == [0, 1, 0, 1, 0, 1, 0, 0]


@given(counts, st.integers(0, 300))
def test_scaled_counts_keep_the_sum_and_give_each_one(counts: list[int], more: int) -> None:
    total = len(counts) + more
    scaled = scaled_counts(counts, total)
    assert sum(scaled) == total
    assert min(scaled) >= 1


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 30))
def test_equal_counts_stay_equal(pipelines: int, before: int, after: int) -> None:
    assert scaled_counts([before] * pipelines, after * pipelines) == (after,) * pipelines


@given(counts)
def test_the_same_total_changes_nothing(counts: list[int]) -> None:
    assert scaled_counts(counts, sum(counts)) == tuple(counts)


@given(counts)
def test_doubling_keeps_the_order_of_pipelines(counts: list[int]) -> None:
    scaled = scaled_counts(counts, 2 * sum(counts))
    for a, b in zip(range(len(counts) - 1), range(1, len(counts)), strict=True):
        if counts[a] > counts[b]:
            assert scaled[a] >= scaled[b]


def test_too_few_micro_batches_are_refused_with_both_numbers() -> None:
    with pytest.raises(BadInputError, match="3 micro-batches for 4 pipelines"):
        scaled_counts([1, 1, 1, 1], 3)
