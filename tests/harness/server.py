"""The one server that the ranks are forked from, with torch and Megatron in its memory.

Importing them takes ten seconds of a core for every process; a fork of a process that has done so
takes milliseconds. docs/log.md has the figures. What is preloaded was imported before CPU mode
replaced anything, other than in a job of its own: at least one test must start a job through
torchrun.
"""

import functools
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # every torch optimizer imports it
    "megatron.core",
    "megatron.training",
    "malleus_megatron.adapter.plugin",
    "malleus_megatron.adapter.seams",
    "tests.harness.rank_process",
)
START_LIMIT_S = 100.0

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # ranks are CPU processes, on a machine with GPUs too
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Of the server and of every rank; the server needs it before torch is imported."""


@functools.cache
def fork_server() -> ForkServerContext:
    """Start the server, once, and wait until it can fork: no rank's time limit pays for it.

    Raises:
        TimeoutError: it did not get there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with _environment(ENVIRONMENT):
        first = context.Process(target=_nothing)
        first.start()
    first.join(START_LIMIT_S)
    if first.exitcode != 0:
        first.kill()
        raise TimeoutError(
            f"The server of the test ranks was not ready after {START_LIMIT_S:.0f} s "
            f"(status {first.exitcode}); it imports {', '.join(PRELOADED)}."
        )
    return context


def _nothing() -> None:
    """The first fork: done when the server has imported everything."""


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)
