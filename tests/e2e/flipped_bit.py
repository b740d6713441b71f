"""A job in which bits of memory flip: $FLIPS says when, on which rank, in what.

Each flip is [iteration, rank, state, parameter, times]: before that iteration's check the second
bit of the exponent of the third element is turned over (four times the value, or a quarter) in the
rank's first tensor of this state ("parameter", "exp_avg", ...) whose name ends so. The second time
is after a repair. From the iteration and on the rank of $FAILS on a check cannot read its tensors.
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


class Damage:
    """Does what the environment asks for."""

    def __init__(self) -> None:
        self._flips = json.loads(os.environ["FLIPS"])
        self._fails = json.loads(os.environ["FAILS"])
        self._iteration = 0

    def before_iteration(self, original: Callable[..., None]) -> Callable[..., None]:
        """Damage what the check looks at, once a plan of the same boundary is in place."""

        def before_iteration(check: ReplicaCheck, iteration: int, plan: Any) -> None:
            self._iteration = iteration
            self._flip(check, time=1)
            original(check, iteration, plan)

        return before_iteration

    def repair(self, original: Callable[..., None]) -> Callable[..., None]:
        def repair(check: ReplicaCheck, *args: Any) -> None:
            original(check, *args)
            self._flip(check, time=2)

        return repair

    def state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def state(check: ReplicaCheck) -> Any:
            at, rank = self._fails
            if self._iteration >= at and check._agreement.rank == rank:
                raise RuntimeError("it fails here")
            return original(check)

        return state

    def _flip(self, check: ReplicaCheck, *, time: int) -> None:
        for at, rank, state, parameter, times in self._flips:
            if (at, rank) == (self._iteration, check._agreement.rank) and time <= times:
                flip(check, state, parameter)


def main() -> None:
    damage = Damage()
    for name in ("before_iteration", "_repair", "_state"):
        replacement = getattr(damage, name.removeprefix("_"))
        setattr(ReplicaCheck, name, replacement(getattr(ReplicaCheck, name)))
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
