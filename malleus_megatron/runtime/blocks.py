"""Memory of tensors that leaves and comes back while the tensors stay where they are named.

A tensor without memory keeps its shape, its views and everyone who refers to it; nobody may look
at its values or take new views of it. Optimizers and models need not know.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from malleus_megatron.errors import MigrationError


class Blocks:
    """Tensors by the name of the block that they come and go with."""

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """Look at the memory that each block has, or had before it was given back.

        Args:
            tensors: Of each block. A tensor is in one block alone; views of it may be anywhere.
        """
        self._storages = {
            name: [(tensor.untyped_storage(), _extent(tensor)) for tensor in members]
            for name, members in tensors.items()
        }

    def check(self) -> None:
        """See that every block can leave, and leaves the others alone.

        Raises:
            MigrationError: naming the block.
        """
        owners: dict[int, str] = {}
        for name, storages in self._storages.items():
            for storage, _ in storages:
                if not storage.resizable():
                    raise MigrationError(
                        f"the memory of {name} cannot be given back: it is not torch's own, or "
                        "was shown to numpy."
                    )
                owner = owners.setdefault(storage._cdata, name)  # noqa: SLF001 - its identity
                if owner != name:
                    raise MigrationError(f"{name} lies in the memory of {owner}.")

    def free(self, names: Iterable[str]) -> None:
        """Give back the memory of these blocks."""
        for name in names:
            for storage, _ in self._storages[name]:
                storage.resize_(0)
        # What the allocator keeps in pieces of their sizes is of no use to other sizes.
        torch.cuda.empty_cache()

    def allocate(self, names: Iterable[str]) -> None:
        """Let these blocks have memory again, with any values."""
        for name in names:
            for storage, extent in self._storages[name]:
                _give(storage, extent)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Let tensors lose their memory."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


@contextmanager
def present(tensors: Sequence[Tensor], *, afterwards: bool) -> Iterator[None]:
    """Let tensors have memory, so that views of them can be taken.

    Args:
        tensors: Each alone in its memory.
        afterwards: Whether they keep it.
    """
    for tensor in tensors:
        _give(tensor.untyped_storage(), _extent(tensor))
    yield
    if not afterwards:
        give_back(tensors)


def _extent(tensor: Tensor) -> int:
    """Bytes of the memory up to the tensor's end, which has no gaps."""
    return (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()


def _give(storage: torch.UntypedStorage, extent: int) -> None:
    """Let a storage have so many bytes again, if it has fewer."""
    if storage.nbytes() < extent:
        storage.resize_(extent)
