"""Counting the memory of tensors on a CPU, where no allocator counts.

Every operation of a watched span is seen, and each storage that it gives back is counted until it
is freed. What an operation uses inside of itself is not seen.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StorageCount(TorchDispatchMode):
    """The bytes of all living storages that it was shown or that an operation gave back."""

    def __init__(self, tensors: Iterable[Tensor], *, resizes: bool = False) -> None:
        """Count what is there already.

        Args:
            tensors: Whose storages are there.
            resizes: Whether storages change their size on the way: all are looked at again whenever
                there is a new one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._resizes = resizes
        self._living: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
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
        news = sum(self._note(value) for value in values if isinstance(value, Tensor))
        if news:
            self._see()
        return result

    def look(self) -> int:
        """See storages that have changed their size; the bytes of all."""
        for key, (reference, known_bytes) in list(self._living.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != known_bytes:
                self.now_bytes += storage.nbytes() - known_bytes
                self._living[key] = reference, storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return self.now_bytes

    def forget(self) -> None:
        """Stop counting."""
        self._living.clear()

    def _see(self) -> None:
        if self._resizes:
            self.look()
        else:
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _note(self, tensor: Tensor) -> bool:
        """Whether its storage is a new one."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the storage's identity: wrappers come and go
        if key in self._living:
            return False

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            counted = self._living.pop(key, None)
            self.now_bytes -= 0 if counted is None else counted[1]

        self._living[key] = weakref.ref(storage, freed), storage.nbytes()
        self.now_bytes += storage.nbytes()
        return True


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all tensors together; what several share counts once."""
    storages = {
        storage._cdata: storage.nbytes()  # noqa: SLF001
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())
