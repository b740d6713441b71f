"""The command line: quick help, exit statuses, what the doctor knows."""

import subprocess
import sys

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
