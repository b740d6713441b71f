"""The most memory that tensors took for a while: the CUDA allocator's figure, or our own count.

On a CPU nobody counts. There each operation is looked at when it is done: what it gives back is
counted until it is freed. What an operation uses inside of itself is not seen.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory:
    """Bytes before, at the most, and at the end."""

    before_bytes = 0
    peak_bytes = 0
    after_bytes = 0

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Take what is there already; on CUDA the allocator knows it."""
        self._count = None if torch.cuda.is_available() else _StorageCount(tensors)

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
            self.after_bytes = _StorageCount(tensors).look()

    @property
    def extra_bytes(self) -> int:
        """Beyond the larger of before and after."""
        return max(0, self.peak_bytes - max(self.before_bytes, self.after_bytes))


class _StorageCount(TorchDispatchMode):
    """The bytes of all storages that it was shown or that an operation gave back."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
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
        values = result if isinstance(result, tuple | list) else (result,)
        if sum(self._note(value) for value in values if isinstance(value, Tensor)):
            self.look()
        return result

    def look(self) -> int:
        """Count what lives now."""
        total = 0
        for key, reference in list(self._known.items()):
            storage = reference()
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _note(self, tensor: Tensor) -> bool:
        """Whether its storage is a new one."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's identity
        known = self._known.get(key)
        if known is not None and known() is not None:
            return False
        self._known[key] = weakref.ref(storage)
        return True
