"""The files of the project, as git knows them: tracked, or new and not ignored."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "malleus_megatron"


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Every file that is, or could be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in sorted(set(listed.split("\0"))) if name)
    return tuple(path for path in paths if path.is_file())


@functools.cache
def text_files() -> dict[str, str]:
    """Name in the repository -> content, of every file that is UTF-8 text."""
    texts: dict[str, str] = {}
    for path in project_files():
        try:
            texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def python_files(*folders: str) -> dict[str, str]:
    """Python files below these folders of the repository."""
    return {
        name: text
        for name, text in text_files().items()
        if name.endswith(".py") and name.startswith(tuple(f"{folder}/" for folder in folders))
    }


def definitions(text: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a module with its dotted name."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name.rstrip("."), child  # type: ignore[misc]
            yield from visit(child, name)

    return visit(ast.parse(text), "")
