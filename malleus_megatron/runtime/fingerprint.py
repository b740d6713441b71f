"""A 64-bit hash of tensors' bits, taken where the tensors are: the same on CPU and GPU.

A chunk of up to 2**20 words w_i (8, 16 or 32 bits, as integers) has the sum of w_i * c_i modulo
2**64, with fixed pseudo-random odd weights c_i. The sums s_k of a tensor's chunks become the sum of
mix(s_k + (k + 1) * g), where mix is a bijection.

*What always shows.* A change inside one word moves its chunk's sum by d * c_i with 0 < |d| < 2**32
and c_i odd, which is not 0 modulo 2**64; mix takes unlike sums of one chunk to unlike values. So no
flipped bit, and no other change inside one element of up to four bytes, can hide.

*What may hide.* Changes of several words cancel only if their weighted sum is 0 modulo 2**64. Were
the weights drawn at random, this would have a probability of 2**-(63 - t) for the lowest bit t that
changes in any of them, by the argument for multilinear hashing: 2**-63 for most changes, 2**-32
where only sign bits of fp32 change. Weights that differ from place to place make order count: two
elements that change places are such a change. It is no protection against an adversary.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_WORDS = 2**20
"""Weights and products take 16 MiB, a copy of a chunk of a tensor with gaps 4 MiB more."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Word of an element of so many bytes; one of eight bytes has two."""


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """A number from 0 to 2**64 - 1 for each tensor; equal bits and shape give the same one.

    The device is waited for once, at the end.

    Args:
        tensors: Of any shape and of elements of 1, 2, 4 or 8 bytes, all on one device; views with
            gaps count as if they were packed in row order.
    """
    chunks = [list(_chunks(tensor, _chunk_size(tensor))) for tensor in tensors]
    counts = np.array([len(parts) for parts in chunks], dtype=np.int64)
    if not len(counts):
        return []
    device = tensors[0].device
    weights = torch.from_numpy(_weights()).to(device)
    products = torch.empty_like(weights)
    sums = torch.empty(int(counts.sum()), dtype=torch.int64, device=device)
    for number, chunk in enumerate(part for parts in chunks for part in parts):
        words = chunk.reshape(-1).view(_WORDS[chunk.element_size()])
        size = words.numel()
        torch.mul(words, weights[:size], out=products[:size])
        torch.sum(products[:size], dim=0, out=sums[number])
    starts = counts.cumsum() - counts
    places = np.arange(len(sums)) - np.repeat(starts, counts) + 1
    mixed = _mix(sums.cpu().numpy().view(np.uint64) + places.astype(np.uint64) * _GOLDEN)
    return [int(total) for total in np.add.reduceat(mixed, starts)]


def _chunk_size(tensor: Tensor) -> int:
    """Elements of a chunk."""
    return CHUNK_WORDS // max(1, tensor.element_size() // 4)


def _chunks(tensor: Tensor, max_elements: int) -> Iterator[Tensor]:
    """Cut a tensor along its first axes, the same way for every tensor of this shape."""
    if tensor.numel() <= max_elements:
        yield tensor
        return
    if len(tensor) == 1:
        yield from _chunks(tensor[0], max_elements)
        return
    rows = max(1, max_elements * len(tensor) // tensor.numel())
    for start in range(0, len(tensor), rows):
        yield from _chunks(tensor[start : start + rows], max_elements)


@functools.cache
def _weights() -> NDArray[np.int64]:
    """Odd 64-bit numbers, one for each word of a chunk."""
    numbers = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * _GOLDEN
    return (_mix(numbers) | np.uint64(1)).view(np.int64)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that spreads each bit over all: the finisher of SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FACTORS[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _FACTORS[1]
    return numbers ^ (numbers >> np.uint64(31))
