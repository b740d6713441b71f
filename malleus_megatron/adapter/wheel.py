"""What megatron-core's wheel lacks for training, supplied without replacing anything in it.

Megatron's start runs `make` in its datasets folder to compile the index helpers, and leaves the
process if that fails. The wheel ships the helpers compiled but no Makefile, so a job from the wheel
would end right there. GNU make reads further options from GNUMAKEFLAGS: a default target that does
nothing, in folders that have no makefile of their own.
"""

import importlib.util
from collections.abc import MutableMapping
from pathlib import Path

_NOTHING_TO_MAKE = (
    "--eval=$$(if $$(wildcard GNUmakefile makefile Makefile),,$$(eval already-compiled:;@:))"
)


def allow_missing_makefile(environment: MutableMapping[str, str]) -> None:
    """Let `make` succeed in Megatron's datasets folder if it is the wheel's.

    Args:
        environment: Of this process, which `make` inherits.
    """
    if _helpers_are_compiled() and _NOTHING_TO_MAKE not in environment.get("GNUMAKEFLAGS", ""):
        flags = environment.get("GNUMAKEFLAGS", "")
        environment["GNUMAKEFLAGS"] = f"{flags} {_escaped(_NOTHING_TO_MAKE)}".strip()


def _helpers_are_compiled() -> bool:
    """True for the wheel; a checkout compiles its own with its Makefile."""
    package = importlib.util.find_spec("megatron.core")
    if package is None or package.submodule_search_locations is None:
        return False
    folder = Path(package.submodule_search_locations[0]) / "datasets"
    return not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*.so"))


def _escaped(option: str) -> str:
    """Keep it one word: make splits the variable at blanks without a backslash."""
    return option.replace(" ", "\\ ")
