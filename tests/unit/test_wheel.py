"""`make` in a folder without a makefile succeeds, and in any other does what it did."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from malleus_megatron.adapter import wheel

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs GNU make")


@pytest.fixture(name="environment")
def with_flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(wheel, "_helpers_are_compiled", lambda: True)
    environment = {"PATH": os.environ["PATH"], "GNUMAKEFLAGS": "-s"}
    wheel.allow_missing_makefile(environment)
    wheel.allow_missing_makefile(environment)
    return environment


def make(folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        ["make", "-C", str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_it_fails_without_our_flags(tmp_path: Path) -> None:
    assert make(tmp_path, {"PATH": os.environ["PATH"]})[0] != 0


def test_nothing_to_make_is_a_success(tmp_path: Path, environment: dict[str, str]) -> None:
    assert make(tmp_path, environment)[0] == 0


def test_other_makefiles_are_made(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "Makefile").write_text("all:\n\t@echo made\nother:\n\t@echo other\n")
    assert make(tmp_path, environment) == (0, "made\n")


def test_a_failing_makefile_still_fails(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "Makefile").write_text("all:\n\t@false\n")
    assert make(tmp_path, environment)[0] != 0


def test_a_checkout_that_compiles_its_own_helpers_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wheel, "_helpers_are_compiled", lambda: False)
    environment: dict[str, str] = {}
    wheel.allow_missing_makefile(environment)
    assert environment == {}
