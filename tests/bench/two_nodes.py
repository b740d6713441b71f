"""The timed job, whose ranks say that they are on two nodes: the first half on the first."""

import os
import socket

from tests.bench import timed_job


def main() -> None:
    on_first = int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) // 2
    name = "node-0" if on_first else "node-1"
    socket.gethostname = lambda: name
    timed_job.main()


if __name__ == "__main__":
    main()
