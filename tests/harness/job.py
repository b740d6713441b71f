"""Several ranks as one job: start them, wait for them, end every process that they started."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.harness.rank_process import STACK_SIGNAL

GRACE_S = 10.0
"""What the other ranks get to notice that one of them has failed."""
STACK_S = 0.5
"""What a rank that is about to be killed gets to write down where it hangs."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One rank while it runs."""

    process: ForkServerProcess
    output: Path
    connection: Connection | None = None
    message: bytes | None = None
    exit_code: int | None = None
    killed: bool = False

    def read(self) -> None:
        """Take the message that lies in the pipe; a pipe closed without one is let go."""
        if self.connection is not None:
            with contextlib.suppress(EOFError, ConnectionResetError):
                self.message = self.connection.recv_bytes()
            self.connection = None

    def ended(self) -> None:
        """Note the exit status, and a message sent just before."""
        self.process.join()
        self.exit_code = self.process.exitcode
        if self.connection is not None and self.connection.poll():
            self.read()


def wait_for(members: Sequence[Member], timeout_s: float) -> None:
    """Wait until all have ended; kill all at the time limit, or soon after a rank has failed."""
    try:
        _watch(members, time.monotonic() + timeout_s)
        _stop([member for member in members if member.exit_code is None])
    finally:
        for member in members:
            _kill_session(member.process)


def timed_out(members: Sequence[Member]) -> bool:
    """True if ranks were killed although none had failed by itself."""
    failed = any(not member.killed and member.exit_code != 0 for member in members)
    return not failed and any(member.killed for member in members)


def _watch(members: Sequence[Member], deadline: float) -> None:
    while running := [member for member in members if member.exit_code is None]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        sources = [member.process.sentinel for member in running]
        pipes = [member.connection for member in running if member.connection is not None]
        ready = wait([*sources, *pipes], left_s)
        for member in running:
            if member.connection in ready:
                member.read()
            if member.process.sentinel in ready:
                member.ended()
                if member.exit_code != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)


def _stop(hanging: Sequence[Member]) -> None:
    """Kill ranks that do not end by themselves, after they wrote where they hang."""
    for member in hanging:
        member.killed = True
        _signal(member.process, STACK_SIGNAL)
    if hanging:
        time.sleep(STACK_S)
    for member in hanging:
        _kill_session(member.process)
        _signal(member.process, signal.SIGKILL)
        member.ended()


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _kill_session(process: ForkServerProcess) -> None:
    """Kill what the rank started too; its session has the number of the rank's process."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
