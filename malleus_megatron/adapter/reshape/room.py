"""Memory of a stage that is not needed at an iteration boundary, and how much a stage has."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from malleus_megatron.adapter.reshape.stage import RankStage
from malleus_megatron.adapter.reshape.state import PARAMETER, inner_optimizers
from malleus_megatron.migration.holdings import Holdings
from malleus_megatron.runtime.blocks import Blocks


class GradientBuffers:
    """Those of a stage. Between a step's end and the next one's begin they hold nothing."""

    def __init__(self, model: Sequence[Any]) -> None:
        """Find them; views of them stay as they are."""
        found = {
            f"gradients {number}": [buffer.grad_data]
            for number, buffer in enumerate(_buffers(model))
            if not _is_lent(buffer)
        }
        self._tensors = [tensor for tensors in found.values() for tensor in tensors]
        self._blocks = Blocks(found)
        self._names = [*found]

    def drop(self) -> None:
        """Give their memory back."""
        self._blocks.free(self._names)

    def restore(self) -> None:
        """Let them be there again: zeros, as a step wants them at its begin."""
        self._blocks.allocate(self._names)
        for tensor in self._tensors:
            tensor.zero_()


def tensors_of(stage: RankStage) -> Iterator[Tensor]:
    """All that a stage keeps between steps, gradient buffers included."""
    yield from stage.module.parameters()
    for buffer in _buffers(stage.model):
        yield buffer.grad_data
    for inner in inner_optimizers(stage.optimizer):
        for group in inner.optimizer.param_groups:
            for main in group["params"]:
                yield main
                state = inner.optimizer.state.get(main, {})
                yield from (value for value in state.values() if isinstance(value, Tensor))


def gradient_bytes(held: Holdings, element_bytes: int | None) -> dict[int, int]:
    """What each GPU's gradient buffers take.

    Args:
        held: What all GPUs hold.
        element_bytes: Of a gradient; None: as of its parameter.
    """
    return {
        gpu: sum(
            one.box.num_elements * (element_bytes or one.element_bytes)
            for one in held[gpu]
            if one.block == PARAMETER
        )
        for gpu in held
    }


def _buffers(model: Iterable[Any]) -> Iterator[Any]:
    for chunk in model:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _is_lent(buffer: Any) -> bool:
    """Whether something else lies in its memory, or a network card knows its address."""
    data = buffer.param_data
    shared = data is not None and (
        data.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
    )
    return bool(shared or buffer.nccl_ub)
