"""The harness itself: results, failures of every kind, and nothing left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import RanksFailedError, run_ranks, run_script

pytestmark = pytest.mark.dist


def _sum_of_ranks(offset: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _fail_on(rank: int) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == rank:
        raise ValueError("the number 42 is wrong")
    dist.all_reduce(torch.ones(1))


def _hang_on(rank: int, notes: Path) -> None:
    import torch.distributed as dist

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (notes / f"{dist.get_rank()}").write_text(f"{os.getpid()} {child.pid}")
    if dist.get_rank() == rank:
        _sleep_for_ever()
    dist.barrier()


def _sleep_for_ever() -> None:
    time.sleep(600)


def _vanish_on(rank: int) -> int:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os._exit(7)
    return dist.get_rank()


def _write_everywhere() -> None:
    print("through print")
    subprocess.run(["echo", "through a child"], check=True)
    os.write(2, b"through a descriptor\n")
    raise RuntimeError("to see the output")


def _unpicklable() -> Any:
    return lambda: None


def _is_alive(pid: int) -> bool:
    """A zombie of another parent does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_returns_its_result(world: int) -> None:
    total = sum(range(world)) + 10 * world
    assert run_ranks(world, _sum_of_ranks, 10) == [(rank, total) for rank in range(world)]


def test_ranks_see_the_tests_environment_and_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TEST_SAYS", "hello")
    first, second = run_ranks(2, _environment)
    assert first["A_TEST_SAYS"] == second["A_TEST_SAYS"] == "hello"
    assert [first["RANK"], second["RANK"]] == ["0", "1"]
    assert second["LOCAL_RANK"] == "1"
    assert second["WORLD_SIZE"] == "2"
    assert second["OMP_NUM_THREADS"] == "1"
    assert second["CUDA_VISIBLE_DEVICES"] == ""


def test_a_failure_shows_every_rank() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(3, _fail_on, 1, timeout_s=60)
    text = str(failure.value)
    assert "ValueError: the number 42 is wrong" in text
    for rank in range(3):
        assert f"---- rank {rank}: exit status" in text
        assert f"rank {rank} was here" in text
    assert time.monotonic() - began < 30, "the others must not wait for the time limit"


def test_a_hang_ends_at_the_time_limit_and_shows_where(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="_sleep_for_ever") as failure:
        run_ranks(2, _hang_on, 1, tmp_path, timeout_s=4)
    assert time.monotonic() - began < 20
    assert "killed by the harness" in str(failure.value)
    for note in tmp_path.iterdir():
        for pid in map(int, note.read_text().split()):
            assert not _is_alive(pid), "a rank or its child outlived the job"


def test_what_a_rank_leaves_running_is_ended(tmp_path: Path) -> None:
    run_ranks(2, _hang_on, 9, tmp_path)
    children = [int(note.read_text().split()[1]) for note in tmp_path.iterdir()]
    time.sleep(0.2)
    assert len(children) == 2
    assert not any(_is_alive(child) for child in children)


def test_a_rank_that_vanishes_is_a_failure() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, _vanish_on, 1, timeout_s=30)
    assert "rank 1: exit status 7" in str(failure.value)
    assert "It ended without a result." in str(failure.value)


def test_output_is_kept_whatever_wrote_it() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(1, _write_everywhere)
    for way in ("print", "a child", "a descriptor"):
        assert f"through {way}" in str(failure.value)


def test_a_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RanksFailedError, match="pickle"):
        run_ranks(1, _unpicklable)


def _script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_a_program_runs_as_under_torchrun(tmp_path: Path) -> None:
    program = _script(
        tmp_path,
        "import atexit, multiprocessing, os, sys\n"
        "import torch, torch.distributed as dist\n"
        "import neighbour\n"
        "atexit.register(print, 'exit function ran')\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--flag', '3'], sys.argv\n"
        "assert multiprocessing.get_start_method() == 'fork'\n"
        "assert os.environ['GIVEN'] == 'yes'\n"
        "dist.init_process_group('gloo', init_method='env://')\n"
        "total = torch.tensor([dist.get_rank()]); dist.all_reduce(total)\n"
        "print('sum', int(total), neighbour.NAME, os.getcwd())\n",
    )
    (tmp_path / "neighbour.py").write_text("NAME = 'found'\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    outcomes = run_script(3, [program, "--flag", "3"], env={"GIVEN": "yes"}, cwd=elsewhere)
    for outcome in outcomes:
        assert f"sum 3 found {elsewhere}" in outcome.output
        assert "exit function ran" in outcome.output
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]


def test_a_module_runs_like_python_m(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text('{"a": [1]}')
    outcomes = run_script(2, ["-m", "json.tool", "--compact", "good.json"], cwd=tmp_path)
    assert [outcome.output for outcome in outcomes] == ['{"a":[1]}\n'] * 2


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        ("import sys; sys.exit(2)", 2, ""),
        ("import sys; sys.exit()", 0, ""),
        ("raise SystemExit('in one sentence')", 1, "in one sentence"),
        ("def broken(): return 1 / 0\nbroken()", 1, "in broken"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_the_exit_status_of_a_program(tmp_path: Path, text: str, status: int, shown: str) -> None:
    program = _script(tmp_path, text)
    (outcome,) = run_script(1, [program], expect_exit=None)
    assert outcome.exit_code == status
    assert shown in outcome.output
    with pytest.raises(RanksFailedError, match=f"exit status {status}\n"):
        run_script(1, [program], expect_exit=status + 1)


def test_a_program_that_hangs_is_killed_and_shown(tmp_path: Path) -> None:
    program = _script(tmp_path, "import time\ndef asleep():\n    time.sleep(600)\nasleep()\n")
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="in asleep"):
        run_script(2, [program], timeout_s=3, expect_exit=None)
    assert time.monotonic() - began < 15


def test_ranks_that_wait_for_a_failed_one_are_ended(tmp_path: Path) -> None:
    program = _script(
        tmp_path,
        "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(3)\ntime.sleep(600)\n",
    )
    began = time.monotonic()
    first, second = run_script(2, [program], timeout_s=60, expect_exit=None)
    assert (first.exit_code, second.exit_code) == (3, -9)
    assert time.monotonic() - began < 25


def test_no_rank_outlives_a_killed_test_run(tmp_path: Path, root: Path) -> None:
    program = _script(
        tmp_path,
        "import os, pathlib, time\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n",
    )
    tests = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys\n"
            "from tests.harness import ranks, server\n"
            "server.PRELOADED = ('tests.harness.rank_process',)\n"
            "ranks.run_script(1, [sys.argv[1]], cwd=pathlib.Path(sys.argv[2]))\n",
            program,
            tmp_path,
        ],
        cwd=root,
    )
    _until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    tests.kill()
    tests.wait()
    _until(lambda: not _is_alive(int((tmp_path / "pid").read_text())))


def _until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)
