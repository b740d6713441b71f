"""A job all of whose ranks are killed at the boundary before iteration $KILLED_AT."""

import functools
import os
import signal
from typing import Any

from malleus_megatron import pretrain_gpt
from malleus_megatron.adapter.job import Job


def main() -> None:
    original = Job.begin_iteration

    @functools.wraps(original)
    def begin_iteration(job: Job, iteration: int) -> Any:
        original(job, iteration)
        if iteration == int(os.environ["KILLED_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)

    Job.begin_iteration = begin_iteration  # type: ignore[assignment,method-assign]
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
