"""A job in which bits of memory flip: $FLIPS says when, on which rank, in what.

Each flip is [iteration, rank, state, parameter]: before that iteration the second bit of the
exponent of the third element is turned over (four times the value, or a quarter) in the rank's
first tensor of this state ("parameter", "exp_avg", ...) whose
name ends so.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.replica_check import ReplicaCheck

ELEMENT = 2


def flip(check: ReplicaCheck, state: str, parameter: str) -> None:
    tensors = check._state().tensors
    name = min(
        name
        for name in tensors
        if name.startswith(f"{state}.") and name.partition("@")[0].endswith(parameter)
    )
    size = tensors[name].element_size()
    tensors[name].view(torch.uint8)[ELEMENT * size + size - 1] ^= 1


def flipping(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the check, so that a plan of the same boundary is in place already."""
    flips = json.loads(os.environ["FLIPS"])

    def before_iteration(check: ReplicaCheck, iteration: int, plan: Any) -> None:
        for at, rank, state, parameter in flips:
            if (at, rank) == (iteration, check._agreement.rank):
                flip(check, state, parameter)
        original(check, iteration, plan)

    return before_iteration


def main() -> None:
    ReplicaCheck.before_iteration = flipping(  # type: ignore[method-assign]
        ReplicaCheck.before_iteration
    )
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
