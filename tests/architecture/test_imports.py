"""Who may import what: the contracts of pyproject.toml, start-up weight, declared packages."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.sources import PACKAGE, python_files, text_files

HEAVY = ("torch", "megatron", "numpy", "ortools", "starlette", "uvicorn")
LIGHT = tuple("config errors events plan cost detector planner migration control".split())


def test_the_import_contracts_hold(root: Path) -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages that importing these modules brings into a fresh Python."""
    code = "\n".join(
        [
            "import sys",
            *(f"import {module}" for module in modules),
            "print(' '.join({name.partition('.')[0] for name in sys.modules}))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def modules_of(*packages: str) -> list[str]:
    """Every module below these packages, by its dotted name."""
    names = python_files(*(f"malleus_megatron/{package}" for package in packages))
    dotted = [name.removesuffix(".py").removesuffix("/__init__") for name in names]
    return [name.replace("/", ".") for name in dotted if not name.endswith("__main__")]


def test_what_decides_loads_no_heavy_package() -> None:
    modules = modules_of(*LIGHT) + [
        f"malleus_megatron.{package}" for package in LIGHT if (PACKAGE / f"{package}.py").exists()
    ]
    assert len(modules) > len(LIGHT)
    assert loaded_by(modules).isdisjoint({"torch", "megatron", "numpy"})


def test_the_sidecar_never_loads_torch() -> None:
    assert loaded_by(modules_of("sidecar")).isdisjoint({"torch", "megatron"})


def test_the_command_line_starts_light() -> None:
    assert loaded_by(["malleus_megatron.cli.main"]).isdisjoint(HEAVY)


def test_the_entry_points_are_imported_without_megatron() -> None:
    """CPU mode has to stand before Megatron is imported, and bad input is refused before that."""
    loaded = loaded_by(["malleus_megatron.pretrain_gpt", "malleus_megatron.run"])
    assert "megatron" not in loaded


def requirements() -> dict[str, Requirement]:
    """What setup.py declares, as it was installed: canonical name -> requirement."""
    declared = map(Requirement, importlib.metadata.requires("malleus-megatron") or [])
    return {canonical(requirement.name): requirement for requirement in declared}


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("folder", "extra"),
    [("malleus_megatron", ""), ("scripts", ""), ("patches", ""), ("tests", "dev")],
)
def test_every_package_that_is_imported_is_declared(folder: str, extra: str) -> None:
    beside_each_other = {Path(name).stem for name in python_files("tests/e2e")}
    ours = {"malleus_megatron", "tests"} | beside_each_other
    foreign = imported_packages(folder) - set(sys.stdlib_module_names) - ours
    providers = importlib.metadata.packages_distributions()
    declared = {
        name
        for name, requirement in requirements().items()
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }
    optional = {"transformer_engine", "apex", "nvidia_resiliency_ext"}
    undeclared = {
        package
        for package in foreign - optional
        if declared.isdisjoint(map(canonical, providers.get(package, [])))
    }
    assert not undeclared


def imported_packages(folder: str) -> set[str]:
    """Top-level names of all absolute imports, those inside functions too."""
    found: set[str] = set()
    for text in python_files(folder).values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_constraints_pin_what_is_declared_and_within_its_range() -> None:
    lines = [
        line
        for line in text_files()["constraints.txt"].splitlines()
        if line and not line.startswith("#")
    ]
    pinned = {canonical(Requirement(line).name): Requirement(line) for line in lines}
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[^ ;@]+", line) for line in lines)
    for name, requirement in requirements().items():
        if requirement.marker is not None and requirement.marker.evaluate({"extra": "gpu"}):
            continue
        (exact,) = pinned[name].specifier
        assert requirement.specifier.contains(exact.version), name
