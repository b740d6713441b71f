"""A job, stock or ours, in which one rank's gradients overflow at some iterations.

Megatron's kernel for many tensors refuses an empty list of them, as apex's does.

Environment: OVERFLOW_RANK and OVERFLOW_AT, iterations from 1 with commas between them.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import optimizer

from malleus_megatron import pretrain_gpt

RANK = int(os.environ["OVERFLOW_RANK"])
AT = {int(word) for word in os.environ["OVERFLOW_AT"].split(",")}
steps: list[int] = []


def overflowing(zero_grad_buffer: Callable[[Any], None]) -> Callable[[Any], None]:
    """Megatron calls it once, before the passes of a step: what it leaves is in the sum."""

    def zero_and_spoil(chunk: Any) -> None:
        zero_grad_buffer(chunk)
        steps.append(len(steps) + 1)
        if steps[-1] in AT and torch.distributed.get_rank() == RANK:
            *_, last = (p for p in chunk.module.parameters() if p.dim() == 2)
            last.main_grad.view(-1)[-1] = float("inf")

    return zero_and_spoil


def refusing_none(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_to_some(kernel: Any, flag: Any, lists: Sequence[Sequence[Any]], *more: Any) -> Any:
        if not lists[0]:
            raise RuntimeError("tensor_lists[0].size() must be greater than 0")
        return apply(kernel, flag, lists, *more)

    return apply_to_some


def main() -> None:
    optimizer.multi_tensor_applier = refusing_none(optimizer.multi_tensor_applier)
    DistributedDataParallel.zero_grad_buffer = overflowing(DistributedDataParallel.zero_grad_buffer)
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
