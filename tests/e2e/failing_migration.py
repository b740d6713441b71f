"""A job whose switches of plan fail: in one guarded step after the other, each on another rank.

Attempt after attempt, each step of a migration fails once; then one succeeds. Each rank leaves in
$LOGS what it saw of every attempt. $ROUND_BYTES bounds the rounds, and $BUFFER_BYTES, if set, the
buffers of shares.
"""

import json
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.reshape import course, making
from malleus_megatron.adapter.reshape.stage import StageBuilder
from malleus_megatron.adapter.reshape.switch import Switch
from malleus_megatron.errors import MigrationError, StateLostError
from malleus_megatron.runtime.agreement import Agreement
from tests.e2e.there_and_back import differing, state_bits

AFTERWARDS = "grouping the parameters"
"""Megatron compares the groups of all ranks in it, so this step fails when it is done."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where an attempt fails, and with what."""

    step: int | str
    rank: int
    error: type[Exception]
    message: str


STRIDE = int(os.environ.get("STRIDE", "1"))
SPECIAL = (
    Fault(
        step="building the stage",
        rank=2,
        error=torch.OutOfMemoryError,
        message="CUDA out of memory.",
    ),
    Fault(step="copying what is here", rank=1, error=RuntimeError, message=""),
)
"""The first attempts; then the k-th step fails in the k-th attempt, or k-th $STRIDE."""


def fault_of(attempt: int) -> Fault:
    number = attempt - len(SPECIAL)
    if number < 0:
        return SPECIAL[attempt]
    return Fault(step=number * STRIDE, rank=number % 4, error=RuntimeError, message="it fails here")


@dataclass(kw_only=True)
class Attempt:
    """One switch, as this rank sees it."""

    steps: list[str] = field(default_factory=list)
    error: str | None = None
    changed: list[str] = field(default_factory=list)
    """What is not as before, after a failure."""
    left_over: int = 0
    """Models built for it that are still in memory."""
    groups: int = 0
    """Process groups made for it that are still there."""
    gradients: list[str] = field(default_factory=list)
    """Of the old stage's buffers, those that a failure did not leave as zeros."""


class Saboteur:
    """Counts attempts and their steps, and fails where a fault is due."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self._built: list[weakref.ref[Any]] = []
        self._going = False

    def together(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def together(agreement: Agreement, what: str, step: Callable[[], Any]) -> Any:
            if not self._going:
                return original(agreement, what, step)
            steps = self.attempts[-1].steps
            fault = fault_of(len(self.attempts) - 1)
            due = fault.step in (what, len(steps)) and fault.rank == agreement.rank
            steps.append(what)
            return original(agreement, what, _failing(step, fault, what) if due else step)

        return together

    def model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def model(builder: StageBuilder, view: Any) -> Any:
            chunks = original(builder, view)
            self._built += map(weakref.ref, chunks)
            return chunks

        return model

    def go(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def go(switch: Switch, see: Any, plan: Any, iteration: int) -> Any:
            attempt = Attempt()
            self.attempts.append(attempt)
            before, groups = picture(switch), len(switch._groups)
            self._built, self._going = [], True
            try:
                migration = original(switch, see, plan, iteration)
            except MigrationError as met:
                attempt.error = str(met)
            except StateLostError as lost:
                attempt.error = str(lost)
                self._write(switch)
                raise
            finally:
                self._going = False
            if attempt.error is None:
                self._write(switch)
                return migration
            attempt.left_over = sum(built() is not None for built in self._built)
            attempt.groups = len(switch._groups) - groups
            attempt.changed = differing(before, picture(switch))
            attempt.gradients = gradients_amiss(switch)
            self._write(switch)
            raise MigrationError(attempt.error)

        return go

    def _write(self, switch: Switch) -> None:
        path = Path(os.environ["LOGS"], f"rank{switch._agreement.rank}.json")
        path.write_text(json.dumps([asdict(one) for one in self.attempts]), encoding="utf-8")


def _failing(step: Callable[[], Any], fault: Fault, what: str) -> Callable[[], Any]:
    def fail() -> Any:
        if what == AFTERWARDS:
            step()
        raise fault.error(fault.message)

    return fail


def gradients_amiss(switch: Switch) -> list[str]:
    """Gradient buffers that are not what a step needs at its begin: there, and zeros."""
    buffers = [buffer for chunk in switch.model for buffer in chunk.buffers]
    return [
        f"buffer {number}"
        for number, buffer in enumerate(buffers)
        if not buffer.grad_data.untyped_storage().nbytes() or buffer.grad_data.any()
    ]


def picture(switch: Switch) -> dict[str, Any]:
    """Everything that a failed attempt must leave alone: bits, random streams, settings."""
    config = switch._builder.config
    tracked = get_cuda_rng_tracker().get_states()
    return {
        **state_bits(switch),
        "random stream": torch.get_rng_state().clone(),
        **{f"random stream {name}": state.clone() for name, state in tracked.items()},
        **{f"config {name}": str(getattr(config, name)) for name in switch._nominal.config},
        "config perform_initialization": str(config.perform_initialization),
        "finalize_model_grads_func": str(config.finalize_model_grads_func),
        "is nominal": str(switch.is_nominal),
    }


def main() -> None:
    saboteur = Saboteur()
    course.MAX_ROUND_BYTES = int(os.environ["ROUND_BYTES"])
    if "BUFFER_BYTES" in os.environ:
        making.MAX_BUFFER_BYTES = int(os.environ["BUFFER_BYTES"])
    for owner, name in ((Agreement, "together"), (StageBuilder, "model"), (Switch, "_go")):
        replacement = getattr(saboteur, name.removeprefix("_"))
        setattr(owner, name, replacement(getattr(owner, name)))
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
