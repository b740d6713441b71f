"""An oracle of migrations: local tensors as small arrays that are filled box by box."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from malleus_megatron.migration.holdings import Holding, Holdings
from malleus_megatron.migration.transfers import Transfer

Arrays = dict[tuple[int, str], NDArray[np.int64]]
"""Local tensors by GPU and name, with the shape of their boxes."""


def local_slices(holding: Holding) -> tuple[slice, ...]:
    """Where a local tensor lies in its global tensor."""
    return tuple(slice(start, end) for start, end in holding.box.spans)


@dataclass(frozen=True)
class Truth:
    """Global tensors whose every element is a number of its own."""

    tensors: Mapping[str, NDArray[np.int64]]

    @classmethod
    def of(cls, *sides: Holdings) -> "Truth":
        shapes = {
            holding.key: holding.global_shape
            for side in sides
            for held in side.values()
            for holding in held
        }
        start, tensors = 1, {}
        for key, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            tensors[key] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
            start += size
        return cls(tensors)

    def local(self, holdings: Holdings) -> Arrays:
        """What every GPU has if all is right."""
        return {
            (gpu, holding.name): self.tensors[holding.key][local_slices(holding)].copy()
            for gpu, held in holdings.items()
            for holding in held
        }

    def held(self, holdings: Holdings) -> dict[tuple[int, str], NDArray[np.bool_]]:
        """Which elements of which key a GPU holds in any of its tensors."""
        masks = {
            (gpu, key): np.zeros(tensor.shape, dtype=bool)
            for gpu in holdings
            for key, tensor in self.tensors.items()
        }
        for gpu, held in holdings.items():
            for holding in held:
                masks[gpu, holding.key][local_slices(holding)] = True
        return masks


def zeros(holdings: Holdings) -> Arrays:
    """New local tensors, empty."""
    return {
        (gpu, holding.name): np.zeros(holding.box.shape, dtype=np.int64)
        for gpu, held in holdings.items()
        for holding in held
    }


def move(moves: Iterable[Transfer], old: Arrays, new: Arrays, arrived: Arrays) -> None:
    """Do what a migration does, and count how often each element arrives."""
    for one in moves:
        source = old[one.source_gpu, one.source.name]
        target = one.destination_gpu, one.destination.name
        new[target][one.destination_slices] = source[one.source_slices]
        arrived[target][one.destination_slices] += 1


def lower_bound_bytes(held: Holdings, needed: Holdings) -> dict[int, int]:
    """Bytes of the elements that a GPU needs and does not hold; GPUs with none left out."""
    truth = Truth.of(held, needed)
    have, want = truth.held(held), truth.held(needed)
    sizes = {h.key: h.element_bytes for side in needed.values() for h in side}
    missing: dict[int, int] = {}
    for (gpu, key), mask in want.items():
        lacking = mask & ~have[gpu, key] if (gpu, key) in have else mask
        missing[gpu] = missing.get(gpu, 0) + int(lacking.sum()) * sizes.get(key, 0)
    return {gpu: num_bytes for gpu, num_bytes in sorted(missing.items()) if num_bytes}
