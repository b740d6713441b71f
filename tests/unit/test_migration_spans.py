"""Spans of a flattened tensor are cut into few boxes, each element once."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from malleus_megatron.migration.boxes import Box
from malleus_megatron.migration.spans import boxes_of_span


@st.composite
def boxes_and_spans(draw: st.DrawFn) -> tuple[Box, tuple[int, int]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offset = tuple(draw(st.integers(0, 9)) for _ in shape)
    size = math.prod(shape)
    start = draw(st.integers(-2, size + 2))
    return Box(offset=offset, shape=shape), (start, draw(st.integers(start, size + 4)))


@given(boxes_and_spans())
def test_the_boxes_hold_the_spans_elements_in_row_order(case: tuple[Box, tuple[int, int]]) -> None:
    box, span = case
    numbers = np.arange(box.num_elements).reshape(box.shape)
    parts = list(boxes_of_span(box, span))
    found = [number for part, _ in parts for number in numbers[box.slices_of(part)].ravel()]
    assert found == list(range(max(span[0], 0), min(span[1], box.num_elements)))
    for part, (low, high) in parts:
        assert part.num_elements == high - low
        assert numbers[box.slices_of(part)].ravel().tolist() == list(range(low, high))


@given(boxes_and_spans())
def test_a_matrix_needs_three_boxes_at_most(case: tuple[Box, tuple[int, int]]) -> None:
    box, span = case
    assert len(list(boxes_of_span(box, span))) <= 2 * len(box.shape) - 1
