"""`malleus doctor`: can this machine train under --malleus, and if not, why?"""

import argparse
import importlib.metadata
import json
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from malleus_megatron import __version__
from malleus_megatron.errors import EXIT_BAD_INPUT, MalleusError

PACKAGES = (
    "torch",
    "megatron-core",
    "ortools",
    "nvidia-ml-py",
    "transformer-engine",
    "apex",
    "nvidia-resiliency-ext",
)
UNDECLARED = ("psutil",)
"""What megatron-core's wheel needs for torch_dist saves and does not declare."""

OLDEST_RESILIENCY = (0, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    ok: bool
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(arguments: argparse.Namespace) -> int:
    """Print all findings; 0 if a job can start, else 2."""
    warnings.simplefilter("ignore")
    findings = examine()
    if arguments.json:
        document = {
            "schema_version": 1,
            "ok": all(finding.ok for finding in findings),
            "findings": [asdict(finding) for finding in findings],
        }
        sys.stdout.write(json.dumps(document, sort_keys=True) + "\n")
    else:
        for finding in findings:
            mark = "ok" if finding.ok else "REFUSED"
            sys.stdout.write(f"{mark:8} {finding.what}: {finding.detail}\n")
    return 0 if all(finding.ok for finding in findings) else EXIT_BAD_INPUT


def examine() -> list[Finding]:
    """Look at versions, devices, known clashes, and every row that would be replaced."""
    versions = {name: _version(name) for name in (*PACKAGES, *UNDECLARED)}
    findings = [
        Finding(what="malleus-megatron", ok=True, detail=__version__),
        _python(),
        *(_package(name, versions[name]) for name in (*PACKAGES, *UNDECLARED)),
    ]
    clash = resiliency_clash(versions["nvidia-resiliency-ext"])
    if clash is not None:
        return [*findings, Finding(what="nvidia-resiliency-ext", ok=False, detail=clash)]
    return [*findings, *_torch(), *_seams(), *_refusals()]


def resiliency_clash(version: str | None) -> str | None:
    """What is wrong with an installed nvidia-resiliency-ext, or None."""
    if version is None:
        return None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers >= OLDEST_RESILIENCY:
        return None
    return (
        f"{version} makes megatron-core 0.19 fail at import; uninstall it, or install >= "
        f"{'.'.join(map(str, OLDEST_RESILIENCY))} where your glibc allows."
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    return Finding(
        what="python",
        ok=sys.version_info >= (3, 12),
        detail=f"{platform.python_version()} (megatron-core 0.19 needs 3.12)",
    )


def _package(name: str, version: str | None) -> Finding:
    optional = name in {"transformer-engine", "apex", "nvidia-resiliency-ext"}
    if version is None:
        detail = "not installed, optional" if optional else f"missing: pip install {name}"
        return Finding(what=name, ok=optional, detail=detail)
    if name == "apex" and not _is_nvidia_apex():
        detail = f"{version} is another project of that name; pip uninstall apex"
        return Finding(what=name, ok=False, detail=detail)
    return Finding(what=name, ok=True, detail=version)


def _is_nvidia_apex() -> bool:
    files = importlib.metadata.files("apex") or []
    return any(str(file).startswith("apex/optimizers/") for file in files)


def _torch() -> list[Finding]:
    try:
        from malleus_megatron.runtime.devices import device_names

        names = device_names()
    except ImportError as error:
        return [Finding(what="import torch", ok=False, detail=str(error))]
    detail = f"{len(names)} GPU(s): {', '.join(names)}" if names else "no GPU: CPU mode, gloo"
    return [Finding(what="device", ok=True, detail=detail)]


def _refusals() -> list[Finding]:
    """What a recipe must not use: on a CPU at all, and for the higher levels."""
    from malleus_megatron.adapter.gpu_flags import REFUSED
    from malleus_megatron.adapter.levels import OBSERVE_OBSTACLES, RESHAPE_OBSTACLES

    flags = ", ".join(sorted({rule.flag for rule in REFUSED}))
    observe = "; ".join(obstacle.reason for obstacle in OBSERVE_OBSTACLES)
    rebalance = "; ".join(obstacle.reason for obstacle in RESHAPE_OBSTACLES)
    return [
        Finding(what="CPU mode refuses", ok=True, detail=flags),
        Finding(what="level observe only with", ok=True, detail=observe),
        Finding(what="level rebalance at most with", ok=True, detail=rebalance),
    ]


def _seams() -> list[Finding]:
    """Every attribute that is replaced: under --malleus, and in CPU mode."""
    try:
        from malleus_megatron.adapter.inventory import inventory, source_patches

        rows: list[tuple[str, Any, str | None]] = inventory()
        sources = source_patches()
    except (ImportError, MalleusError) as error:
        return [Finding(what="import megatron", ok=False, detail=str(error))]
    return [
        Finding(what="Megatron's sources", ok=True, detail=sources),
        *(
            Finding(what=f"{kind} {row.target}", ok=fault is None, detail=fault or row.reason)
            for kind, row, fault in rows
        ),
    ]
