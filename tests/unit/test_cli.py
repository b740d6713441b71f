"""The command line: quick help, exit statuses, what the doctor knows."""

import subprocess
import sys
from pathlib import Path

import pytest

from malleus_megatron.cli import doctor
from malleus_megatron.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command in text


@pytest.mark.parametrize(("words", "said"), [([], "usage"), (["plant"], "no command 'plant'")])
def test_wrong_use_is_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from malleus_megatron.cli.main import main\n"
        "main(['--help'])\n"
        "heavy = {'torch', 'megatron', 'numpy', 'ortools', 'starlette'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("version", "clashes"),
    [(None, False), ("0.4.1", True), ("0.3.0.dev1", True), ("0.5.0", False), ("1.2", False)],
)
def test_the_resiliency_package_that_breaks_megatron_is_named(
    version: str | None, clashes: bool
) -> None:
    message = doctor.resiliency_clash(version)
    assert (message is not None) == clashes
    if message is not None:
        assert version is not None
        assert version in message


ENTRY = "from malleus_megatron.cli import main; import sys; "
LONG = ENTRY + "main._overview = lambda: 'long\\n' * 100_000; "


@pytest.mark.parametrize("before", [ENTRY, LONG])
def test_a_full_standard_output_is_status_2_and_one_sentence(before: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{before}sys.exit(main.main(['--help']))"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "malleus: standard output cannot be written: No space left on device.\n"


@pytest.mark.parametrize("before", [ENTRY, LONG])
def test_a_reader_that_has_seen_enough_ends_it_quietly(before: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"{before}sys.exit(main.main(['--help']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
