"""What one rank runs: it starts as a fork of the preloaded server, in a session of its own."""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the Python stack of each thread into its output, wherever it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """Where and as whom a rank runs."""

    rank: int
    world_size: int
    environment: Mapping[str, str]
    folder: Path
    output: Path
    timeout_s: float


def call_function(task: RankTask, payload: bytes, connection: Connection, store: Path) -> None:
    """Call a pickled (function, arguments) inside a gloo group and send back what it returns.

    The message is a pickled pair (True, value) or (False, traceback).
    """
    _settle(task)
    try:
        function, arguments = pickle.loads(payload)
        sys.argv = [function.__name__]
        with _process_group(task, store):
            answer = pickle.dumps((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 the test that waits for it raises it again
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        _leave(1)
    connection.send_bytes(answer)
    _leave(0)


def run_program(task: RankTask, argv: Sequence[str]) -> None:
    """Run `python ARGV...`: a script, or `-m MODULE`, with everything that a fresh Python does."""
    _settle(task)
    multiprocessing.set_start_method("fork", force=True)
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path.insert(0, str(task.folder))
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        _leave(_exit_status(stop.code))
    except BaseException:  # noqa: BLE001 the interpreter would do the same
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _settle(task: RankTask) -> None:
    # What the server has imported lives for ever: a collection need not look through it, and the
    # pages stay shared with the other ranks.
    gc.freeze()
    os.setsid()
    _die_with_parent()
    os.chdir(task.folder)
    os.environ.clear()
    os.environ.update(task.environment)
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    for standard in (1, 2):
        _redirect(os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 a descriptor
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    faulthandler.register(STACK_SIGNAL, sys.stderr)


def _die_with_parent() -> None:
    """Be killed when the server ends, which ends with the tests' process, however that ends.

    The server lives as long as someone holds the pipe of which every fork has a copy.
    """
    if (pipe := forkserver._forkserver._forkserver_alive_fd) is not None:  # type: ignore[attr-defined]
        os.close(pipe)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux's prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _redirect(descriptor: int, standard: int) -> None:
    os.dup2(descriptor, standard)
    os.close(descriptor)


@contextlib.contextmanager
def _process_group(task: RankTask, store: Path) -> Iterator[None]:
    import torch.distributed as dist  # the server has it

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.timeout_s),
    )
    # A rank with nothing to do would be gone before the others have connected to it.
    dist.barrier()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _leave(status: int) -> None:
    """End as the interpreter would: wait for threads, run the exit functions, flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status & 0xFF)
