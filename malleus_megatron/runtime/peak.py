"""The most memory that tensors took during a switch: the CUDA allocator's figure, or a count."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from malleus_megatron.runtime.storages import StorageCount, storage_bytes


class PeakMemory:
    """Bytes before, at the most, and at the end."""

    before_bytes = 0
    peak_bytes = 0
    after_bytes = 0

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Take what is there already; on CUDA the allocator knows it."""
        self._count: StorageCount | None = None
        if not torch.cuda.is_available():
            self._count = StorageCount(tensors, resizes=True)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch; read the figures afterwards."""
        if self._count is None:
            torch.cuda.reset_peak_memory_stats()
            self.before_bytes = torch.cuda.memory_allocated()
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated()
            return
        self.before_bytes = self._count.look()
        with self._count:
            yield
        self._count.look()
        self.peak_bytes = self._count.peak_bytes

    def look(self) -> None:
        """After memory has come back to a tensor, which is no operation."""
        if self._count is not None:
            self._count.look()

    def end(self, tensors: Iterable[Tensor]) -> None:
        """When the old tensors are gone: what is there now."""
        if self._count is None:
            self.after_bytes = torch.cuda.memory_allocated()
        else:
            self.after_bytes = storage_bytes(tensors)

    def forget(self) -> None:
        """After a switch that failed: its peak is none of the steps to come."""
        if self._count is None:
            torch.cuda.reset_peak_memory_stats()

    @property
    def extra_bytes(self) -> int:
        """Beyond the larger of before and after."""
        return max(0, self.peak_bytes - max(self.before_bytes, self.after_bytes))
