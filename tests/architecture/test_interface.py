"""What others rely on, frozen: flags, commands, make targets; and docs that keep up with them."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import malleus_megatron
from malleus_megatron.config import flag_names
from malleus_megatron.errors import EXIT_BAD_INPUT, EXIT_INFEASIBLE
from tests.architecture.sources import text_files

FLAGS = [
    "--malleus",
    "--malleus-plan",
    "--malleus-plan-schedule",
    "--malleus-inject",
    "--malleus-pace",
    "--malleus-log-dir",
    "--malleus-require",
    "--malleus-device",
    "--malleus-migration-memory",
    "--malleus-sidecar",
    "--malleus-listen",
    "--malleus-token-file",
    "--malleus-check-replicas",
    "--malleus-on-bad-replica",
    "--malleus-memory",
    "--malleus-trace",
    "--malleus-record",
]

TARGETS = {"setup", "demo", "test", "check", "fmt", "lint", "types", "arch", "unit", "gpu-check"}


def test_the_flags_are_these() -> None:
    """A new flag is a promise for years: think twice, then add it here, to README and changelog."""
    assert flag_names() == FLAGS


def test_the_exit_statuses_are_these() -> None:
    assert (EXIT_INFEASIBLE, EXIT_BAD_INPUT) == (1, 2)


def test_the_readme_names_every_flag() -> None:
    readme = text_files()["README.md"]
    assert [flag for flag in FLAGS if not re.search(rf"`{flag}[ `]", readme)] == []


def make_targets() -> set[str]:
    """Targets that have a description."""
    return set(re.findall(r"^([a-z-]+):.* ## ", text_files()["Makefile"], re.MULTILINE))


def test_the_make_targets_are_there() -> None:
    assert make_targets() >= TARGETS


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_a_make_target_that_a_page_names_exists(name: str) -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", "\n".join(code(text_files()[name]))))
    assert named <= make_targets()


def code(page: str) -> list[str]:
    """What stands between back ticks or indented by four spaces."""
    return re.findall(r"`([^`\n]+)`", page) + re.findall(r"^ {4,}(.*)$", page, re.MULTILINE)


def test_links_between_pages_lead_somewhere(root: Path) -> None:
    broken = [
        f"{name}: {target}"
        for name, text in text_files().items()
        if name.endswith(".md")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        if not (root / name).parent.joinpath(target).exists()
    ]
    assert not broken


def test_the_version_stands_in_the_changelog() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", text_files()["CHANGELOG.md"], re.MULTILINE)
    assert malleus_megatron.__version__ in headings


def test_a_decision_has_all_its_parts() -> None:
    entries = re.split(r"^## ", text_files()["docs/decisions.md"], flags=re.MULTILINE)[1:]
    assert entries
    for number, entry in enumerate(entries, start=1):
        title = entry.splitlines()[0]
        assert title.startswith(f"D{number}. "), title
        for part in ("Context", "Decision", "Rejected", "Consequence", "Revisit when"):
            assert f"**{part}.**" in entry, f"{title}: no {part}"


def test_ci_runs_the_test_command_of_the_readme(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert (
        script.read_text(encoding="utf-8")
        .splitlines()[-1]
        .endswith("make --no-print-directory test")
    )
    assert "make test" in text_files()["README.md"]


def test_python_is_found_or_asked_for_in_one_sentence(root: Path) -> None:
    finder = ["sh", "scripts/find_python.sh"]
    found = subprocess.run(finder, cwd=root, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    asked = subprocess.run(
        [found.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == "(3, 12)"
    missing = subprocess.run(
        finder,
        cwd=root,
        env={"PATH": os.environ["PATH"], "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "install it" in missing.stderr
    assert missing.stderr.count("\n") == 1
