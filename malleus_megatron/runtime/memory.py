"""How much memory tensors take in a step, now and at most: the allocator's word, or a count."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from malleus_megatron.runtime.storages import StorageCount


class Meter(Protocol):
    """Memory of this rank, in bytes."""

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Around a step that is to be measured."""

    def now_bytes(self) -> int:
        """Of all tensors, in a watched step."""

    def peak_bytes(self) -> int:
        """The most of it: since `restart`, or in the last watched step."""

    def outside_bytes(self) -> int:
        """In use on the device, but not the allocator's."""

    def restart(self) -> None:
        """Forget the peak: another stage is in place."""


class CudaMeter:
    """Asks the allocator and the driver; costs a few microseconds and waits for nothing."""

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to prepare."""
        return contextlib.nullcontext()

    def now_bytes(self) -> int:
        """Allocated."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """Allocated at most since `restart`, or since the process began."""
        return torch.cuda.max_memory_allocated()

    def outside_bytes(self) -> int:
        """Context, communicators, libraries, and other processes on the device."""
        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - torch.cuda.memory_reserved())

    def restart(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats()


class CpuMeter:
    """Counts storages in watched steps."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self._count: StorageCount | None = None
        self._peak_bytes = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count what there is and what the step makes."""
        self._count = StorageCount(_living_tensors())
        try:
            with self._count:
                yield
        finally:
            self._peak_bytes = self._count.peak_bytes
            self._count.forget()
            self._count = None

    def now_bytes(self) -> int:
        """Of all storages; 0 outside of a watched step."""
        return 0 if self._count is None else self._count.now_bytes

    def peak_bytes(self) -> int:
        """Of the last watched step."""
        return self._peak_bytes

    def outside_bytes(self) -> int:
        """Processes share the machine's memory: nothing is laid to one of them."""
        return 0

    def restart(self) -> None:
        """Every watched step has a peak of its own."""


def _living_tensors() -> list[Tensor]:
    """Of the plain kinds: others may stand for no memory at all."""
    return [thing for thing in gc.get_objects() if type(thing) in _PLAIN]


_PLAIN = (Tensor, torch.nn.Parameter)
