"""The hash of tensors against its definition, and what must change it."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from malleus_megatron.runtime import fingerprint
from malleus_megatron.runtime.fingerprint import CHUNK_WORDS, fingerprints

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(number: int) -> int:
    """Of SplitMix64, in Python's unbounded integers."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def definition(chunks: list[list[int]]) -> int:
    """The hash of words that are cut into chunks already."""
    total = 0
    for place, words in enumerate(chunks, start=1):
        chunk_sum = sum(
            word * (mix((i + 1) * GOLDEN & MASK) | 1) for i, word in enumerate(words)
        )
        total += mix((chunk_sum + place * GOLDEN) & MASK)
    return total & MASK


def of(tensor: Tensor) -> int:
    return fingerprints([tensor])[0]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def flipped(tensor: Tensor, element: int, bit: int) -> Tensor:
    """A copy with one bit of an element turned over."""
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[element * copy.element_size() + bit // 8] ^= 1 << bit % 8
    return copy


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight words a chunk, so that small tensors have many."""
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", 8)
    weights = fingerprint._weights()[:8]
    monkeypatch.setattr(fingerprint, "_weights", lambda: weights)


def test_one_chunk_is_its_weighted_sum() -> None:
    values = [1.5, -2.0, 0.0, -0.0, float("nan"), float("inf"), 1e-40]
    words = torch.tensor(values).view(torch.int32).tolist()
    assert of(torch.tensor(values)) == definition([words])
    halves = torch.tensor(values, dtype=torch.bfloat16)
    assert of(halves) == definition([halves.view(torch.int16).tolist()])
    doubles = torch.tensor(values, dtype=torch.float64)
    assert of(doubles) == definition([doubles.view(torch.int32).tolist()])


@pytest.mark.usefixtures("small_chunks")
def test_chunks_are_cut_by_rows_and_inside_of_long_rows() -> None:
    def words(*parts: Tensor) -> list[list[int]]:
        return [part.reshape(-1).view(torch.int32).tolist() for part in parts]

    rows = noise(5, 3)
    assert of(rows) == definition(words(rows[:2], rows[2:4], rows[4:]))
    long = noise(2, 1, 11)
    chunks = words(long[0, 0, :8], long[0, 0, 8:], long[1, 0, :8], long[1, 0, 8:])
    assert of(long) == definition(chunks)
    doubles = noise(6).double()
    assert of(doubles) == definition(words(doubles[:4], doubles[4:]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("small_chunks")
def test_every_flipped_bit_shows(dtype: torch.dtype) -> None:
    tensor = noise(3, 7, dtype=dtype)
    bits = 8 * tensor.element_size()
    changed = [flipped(tensor, e, bit) for e in range(tensor.numel()) for bit in range(bits)]
    found = fingerprints([tensor, *changed])
    assert len(set(found)) == 1 + 21 * bits


def test_a_flipped_bit_shows_at_the_ends_of_real_chunks() -> None:
    tensor = noise(CHUNK_WORDS + 5)
    places = (0, CHUNK_WORDS - 1, CHUNK_WORDS, CHUNK_WORDS + 4)
    changed = [flipped(tensor, place, bit) for place in places for bit in (0, 31)]
    assert len(set(fingerprints([tensor, *changed]))) == 1 + len(changed)


@pytest.mark.usefixtures("small_chunks")
def test_order_counts() -> None:
    tensor, rng = noise(24), random.Random(3)
    orders = [list(range(24))]
    for first in range(24):
        for second in range(first + 1, 24):
            order = list(range(24))
            order[first], order[second] = second, first
            orders.append(order)
    orders += [rng.sample(range(24), 24) for _ in range(300)]
    orders.append([*range(8, 16), *range(8), *range(16, 24)])  # two whole chunks
    assert len(set(fingerprints([tensor[order] for order in orders]))) == len(orders)


def test_two_sign_bits_and_zeros_at_the_end_show() -> None:
    tensor = noise(64)
    pairs = [
        flipped(flipped(tensor, first, 31), second, 31)
        for first in range(64)
        for second in range(first + 1, 64)
    ]
    longer = torch.cat([tensor, torch.ones(1)])
    assert len(set(fingerprints([tensor, longer, *pairs]))) == 2 + len(pairs)
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_a_view_with_gaps_counts_as_if_it_were_packed() -> None:
    whole = noise(6, 10, 4)
    for view in (whole[:, 3:7], whole[..., 1:2], whole.transpose(0, 2), whole[2:3, :, 1:]):
        assert of(view) == of(view.contiguous())
    assert of(whole[1, 2, 3]) == of(whole[1, 2, 3].clone())


def test_many_tensors_at_once_are_each_by_itself() -> None:
    tensors = [noise(size) for size in (1, 5, CHUNK_WORDS + 1, 3)]
    assert fingerprints(tensors) == [of(tensor) for tensor in tensors]
    assert fingerprints([]) == []


def test_hashes_of_random_tensors_look_random() -> None:
    """Each bit is set in about half of them, whichever bit of the tensor changes."""
    tensor = noise(256)
    changed = [flipped(tensor, element, bit) for element in range(256) for bit in range(32)]
    found = np.array(fingerprints(changed), dtype=np.uint64)
    assert len(np.unique(found)) == len(changed)
    for bit in range(64):
        share = ((found >> np.uint64(bit)) & np.uint64(1)).mean()
        assert abs(share - 0.5) < 0.03, f"bit {bit}: {share}"
