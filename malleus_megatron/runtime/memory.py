"""How much memory tensors take, now and at most: the CUDA allocator's word, or our own count.

On a CPU nobody counts. There every operation of a watched step is seen, and each storage that it
makes is counted until it is freed; what an operation uses inside of itself is not seen.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
        self._count: _StorageCount | None = None
        self._peak_bytes = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count what there is and what the step makes."""
        self._count = _StorageCount(_living_tensors())
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


class _StorageCount(TorchDispatchMode):
    """The bytes of all living storages that it was shown or that an operation gave back."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in tensors:
            self._note(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and look at what it gives back."""
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self._note(value)
        return result

    def forget(self) -> None:
        """Stop counting."""
        self._living.clear()

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's identity: wrappers come and go
        if key in self._living:
            return
        num_bytes = storage.nbytes()

        def freed(_: weakref.ref[Any]) -> None:
            if self._living.pop(key, None) is not None:
                self.now_bytes -= num_bytes

        self._living[key] = (weakref.ref(storage, freed), num_bytes)
        self.now_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all tensors together; what several share counts once."""
    storages = {
        storage._cdata: storage.nbytes()  # noqa: SLF001
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())


def _living_tensors() -> list[Tensor]:
    """Of the plain kinds: others may stand for no memory at all."""
    return [thing for thing in gc.get_objects() if type(thing) in _PLAIN]


_PLAIN = (Tensor, torch.nn.Parameter)
