"""Boxes against arrays that are painted element by element."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from malleus_megatron.errors import MigrationError
from malleus_megatron.migration.boxes import Box, box_of, cells, merged

SIZE = 5


@st.composite
def boxes(draw: st.DrawFn, num_axes: int = 3) -> Box:
    spans = []
    for _ in range(num_axes):
        start = draw(st.integers(0, SIZE - 1))
        spans.append((start, draw(st.integers(start + 1, SIZE))))
    return box_of(spans)


def painted(box: Box) -> NDArray[np.int64]:
    canvas = np.zeros((SIZE,) * len(box.shape), dtype=np.int64)
    canvas[tuple(slice(a, b) for a, b in box.spans)] = 1
    return canvas


def total(parts: Iterable[Box]) -> NDArray[np.int64]:
    return sum(map(painted, parts), start=np.zeros((SIZE,) * 3, dtype=np.int64))


@given(boxes(), st.lists(boxes(), max_size=6))
def test_a_cell_is_covered_wholly_or_not_at_all(within: Box, others: list[Box]) -> None:
    cut = list(cells(within, others))
    assert (total(cell for cell, _ in cut) == painted(within)).all()
    for cell, covering in cut:
        for number, other in enumerate(others):
            inside = painted(other)[painted(cell) == 1]
            assert inside.all() if number in covering else not inside.any()


@given(boxes(), st.lists(boxes(), max_size=6))
def test_merged_boxes_are_the_same_elements_and_no_more_boxes(
    within: Box, others: list[Box]
) -> None:
    cut = [cell for cell, _ in cells(within, others)]
    assert merged(cut) == [within]
    part = cut[::2]
    joined = merged(part)
    assert len(joined) <= len(part)
    assert (total(joined) == total(part)).all()


def test_columns_apart_are_joined_each_for_itself() -> None:
    part = [box_of([(row, row + 1), (col, col + 1)]) for row in range(3) for col in (0, 2)]
    assert merged(part) == [box_of([(0, 3), (0, 1)]), box_of([(0, 3), (2, 3)])]


@given(boxes(), st.integers(1, 130))
def test_split_parts_are_the_whole_and_small(box: Box, max_elements: int) -> None:
    parts = list(box.split(max_elements))
    assert all(part.num_elements <= max_elements for part in parts)
    assert (total(parts) == painted(box)).all()


@given(boxes(), boxes())
def test_overlap_is_a_common_element(a: Box, b: Box) -> None:
    assert a.overlaps(b) == bool((painted(a) & painted(b)).any())


def test_slices_are_relative_to_the_box() -> None:
    whole = Box(offset=(2, 4), shape=(3, 4))
    assert whole.slices_of(Box(offset=(3, 4), shape=(1, 2))) == (slice(1, 2), slice(0, 2))


def test_a_scalar_is_a_box_without_axes() -> None:
    scalar = Box(offset=(), shape=())
    assert (scalar.num_elements, list(scalar.split(1)), merged([scalar])) == (1, [scalar], [scalar])
    assert list(cells(scalar, [scalar])) == [(scalar, (0,))]
    assert scalar.overlaps(scalar)


@pytest.mark.parametrize(
    ("offset", "shape", "said"),
    [
        ((0,), (1, 2), "differ in axes"),
        ((0, 0), (2, 0), "No elements"),
        ((-1, 0), (2, 2), "offset"),
    ],
)
def test_what_is_no_box_is_refused(
    offset: tuple[int, ...], shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(MigrationError, match=said):
        Box(offset=offset, shape=shape)
