"""Functions and programs as the ranks of a job, on CPU: `run_ranks` and `run_script`.

All ranks are forks of one preloaded server (tests/harness/server.py). Output goes to a file a
rank; what fails shows every rank: its exit status, its traceback and the end of its output. Time
limits kill the ranks and all that they started.
"""

import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.job import Member, timed_out, wait_for
from tests.harness.rank_process import RankTask, call_function, run_program
from tests.harness.server import ENVIRONMENT, fork_server

TAIL_LINES = 60


class RanksFailedError(AssertionError):
    """A job that did not end as the test wants; the text shows every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank of a program ended; a negative status is the signal that killed it."""

    rank: int
    exit_code: int
    output: str


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Call `function(*arguments)` on every rank of a gloo group and return what each one returns.

    Function, arguments and results are pickled: the function stands at the top of its module.

    Raises:
        RanksFailedError: a rank raised, died or hung.
    """
    payload = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory(prefix="ranks-") as text:
        folder = Path(text)
        tasks = _tasks(world, folder, Path.cwd(), {}, timeout_s)
        members = [_start_function(task, payload, folder / "store") for task in tasks]
        wait_for(members, timeout_s)
        answers = [_answer(member) for member in members]
        if all(answer.returned for answer in answers):
            return [answer.value for answer in answers]
        title = f"{function.__qualname__} on {world} ranks failed"
        tracebacks = ["" if answer.returned else answer.value for answer in answers]
        raise RanksFailedError(_report(title, members, tracebacks, timeout_s))


def run_script(
    world: int,
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 110.0,
    cwd: Path | None = None,
    expect_exit: int | None = 0,
) -> list[RankOutcome]:
    """Run `python ARGV...` (a script, or "-m", module, ...) as the ranks of one job.

    The program sets up torch.distributed itself, from RANK, WORLD_SIZE and MASTER_*, as it would
    under torchrun.

    Args:
        world: Number of ranks.
        argv: What stands behind `python` on a command line.
        env: Environment variables beside those of this process.
        timeout_s: Of the whole job.
        cwd: Working folder; this process's own if None.
        expect_exit: Exit status that every rank must have; None: any, and ranks that hang once
            another has failed are killed and count as ended.

    Raises:
        RanksFailedError: another exit status, or the time limit was reached.
    """
    words = [str(word) for word in argv]
    with tempfile.TemporaryDirectory(prefix="ranks-") as text:
        tasks = _tasks(world, Path(text), cwd or Path.cwd(), env or {}, timeout_s)
        members = [_start_program(task, words) for task in tasks]
        wait_for(members, timeout_s)
        outcomes = [_outcome(rank, member) for rank, member in enumerate(members)]
        wanted = {expect_exit} if expect_exit is not None else {o.exit_code for o in outcomes}
        if timed_out(members) or any(outcome.exit_code not in wanted for outcome in outcomes):
            title = f"`python {' '.join(words)}` on {world} ranks failed"
            raise RanksFailedError(_report(title, members, [""] * world, timeout_s))
        return outcomes


def _tasks(
    world: int, folder: Path, cwd: Path, env: Mapping[str, str], timeout_s: float
) -> list[RankTask]:
    common = dict(os.environ) | ENVIRONMENT | dict(env)
    common |= {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        RankTask(
            rank=rank,
            world_size=world,
            environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            folder=cwd.resolve(),
            output=folder / f"rank{rank}.txt",
            timeout_s=timeout_s,
        )
        for rank in range(world)
    ]


def _start_function(task: RankTask, payload: bytes, store: Path) -> Member:
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=call_function, args=(task, payload, theirs, store))
    process.start()
    theirs.close()
    return Member(process=process, output=task.output, connection=ours)


def _start_program(task: RankTask, argv: list[str]) -> Member:
    process = fork_server().Process(target=run_program, args=(task, argv))
    process.start()
    return Member(process=process, output=task.output)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    returned: bool
    value: Any
    """What the function returned, or the text of its traceback."""


def _answer(member: Member) -> _Answer:
    if member.message is None:
        return _Answer(returned=False, value="It ended without a result.")
    returned, value = pickle.loads(member.message)
    if returned and member.exit_code != 0:
        return _Answer(returned=False, value="It returned a result and then did not end well.")
    return _Answer(returned=returned, value=value)


def _outcome(rank: int, member: Member) -> RankOutcome:
    assert member.exit_code is not None
    return RankOutcome(rank=rank, exit_code=member.exit_code, output=_text(member.output))


def _report(
    title: str, members: Sequence[Member], tracebacks: Sequence[str], timeout_s: float
) -> str:
    parts = [f"{title} (time limit {timeout_s:.0f} s)."]
    for rank, (member, trace) in enumerate(zip(members, tracebacks, strict=True)):
        killed = ", killed by the harness: where it hung is at the end" if member.killed else ""
        parts.append(f"---- rank {rank}: exit status {member.exit_code}{killed}")
        parts.append(trace.rstrip())
        tail = _text(member.output).splitlines()[-TAIL_LINES:]
        parts += [f"     output, last {len(tail)} lines:", *(f"     {line}" for line in tail)]
    return "\n".join(part for part in parts if part)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
