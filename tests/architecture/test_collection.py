"""All tests are run: no folder of tests has a name that pytest passes by."""

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_folder_of_tests_is_passed_by() -> None:
    """pytest's own list of names to pass by holds "dist"."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    passed_by = settings["tool"]["pytest"]["ini_options"]["norecursedirs"]
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    for folder in folders:
        assert not any(fnmatch.fnmatch(folder, pattern) for pattern in passed_by), folder
