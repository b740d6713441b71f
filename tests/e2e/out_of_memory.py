"""A job that runs out of memory in its first step under a plan, on its last rank."""

import contextlib
import os
from collections.abc import Iterator

import torch

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.job import Job


def main() -> None:
    original = Job.stage_forward

    @contextlib.contextmanager
    def stage_forward(self: Job) -> Iterator[None]:
        if self.is_reshaped and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        with original(self):
            yield

    Job.stage_forward = stage_forward  # type: ignore[method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
