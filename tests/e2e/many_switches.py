"""A job that switches plans many times, and notes what each rank's process holds.

Before every iteration 1 + n * $SAMPLE_EVERY each rank adds a line to its file in $LOGS.
"""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.job import Job


def sample(job: Job) -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    process = psutil.Process()
    assert job._switch is not None
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "groups": len(job._switch._groups),
        "torch_groups": len(dist.distributed_c10d._world.pg_map),
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()),
        "resident_bytes": process.memory_info().rss,
    }


def sampling(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `Job.begin_iteration`."""
    every = int(os.environ["SAMPLE_EVERY"])

    def begin_iteration(job: Job, iteration: int) -> None:
        if iteration % every == 1:
            line: dict[str, Any] = {"iteration": iteration, **sample(job)}
            path = Path(os.environ["LOGS"], f"rank{job._agreement.rank}.jsonl")
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        original(job, iteration)

    return begin_iteration


def main() -> None:
    Job.begin_iteration = sampling(Job.begin_iteration)  # type: ignore[method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
