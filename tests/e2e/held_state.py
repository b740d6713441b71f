"""A job that notes, before each iteration, what its ranks hold and what they have overlapped.

Each rank leaves a line an iteration in $LOGS: bytes of the optimizer's state, as allocated; how
many sums over owners were started inside the backward passes of the last step; and how many
gathers were under way when its forward passes began.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.job import Job
from malleus_megatron.adapter.reshape.buckets import OwnerBuckets
from malleus_megatron.adapter.reshape.state import inner_optimizers
from malleus_megatron.events import json_line

noted = {"sums_in_backward": 0, "gathers_in_forward": 0}


def state_bytes(job: Job) -> int:
    """Main parameters kept beside the model's own, and moments: each allocation once."""
    assert job._switch is not None
    storages: dict[int, int] = {}
    model = {
        parameter.untyped_storage().data_ptr()
        for chunk in job._switch.model
        for parameter in chunk.parameters()
    }
    for inner in inner_optimizers(job._switch._optimizer):
        tensors = [main for group in inner.optimizer.param_groups for main in group["params"]]
        for state in inner.optimizer.state.values():
            tensors += [value for name, value in state.items() if name != "step"]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in model:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def noting(begin_iteration: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Job.begin_iteration`."""

    def begin_and_note(job: Job, iteration: int) -> None:
        line: dict[str, Any] = {"iteration": iteration - 1, **noted, "bytes": state_bytes(job)}
        noted.update(sums_in_backward=0, gathers_in_forward=0)
        path = Path(os.environ["LOGS"], f"rank{job._agreement.rank}.jsonl")
        with path.open("a", encoding="utf-8") as file:
            file.write(json_line(line))
        begin_iteration(job, iteration)

    return begin_and_note


def counting_sums(note_ready: Callable[..., None]) -> Callable[..., None]:
    def note(buckets: OwnerBuckets, *arguments: Any) -> None:
        before = buckets._num_started
        note_ready(buckets, *arguments)
        noted["sums_in_backward"] += buckets._num_started - before

    return note


def counting_gathers(need: Callable[..., None]) -> Callable[..., None]:
    def note(buckets: OwnerBuckets, *arguments: Any) -> None:
        before = len(buckets._gathers)
        need(buckets, *arguments)
        noted["gathers_in_forward"] += before - len(buckets._gathers)

    return note


def main() -> None:
    Job.begin_iteration = noting(Job.begin_iteration)  # type: ignore[method-assign]
    OwnerBuckets.note_ready = counting_sums(OwnerBuckets.note_ready)  # type: ignore[method-assign]
    OwnerBuckets.need = counting_gathers(OwnerBuckets.need)  # type: ignore[method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
