"""Budgets that no tool knows: lines of a file and of a function, and that each says what it is."""

import ast
import statistics

import pytest

from tests.architecture.sources import definitions, python_files

FILE_LINES = {"malleus_megatron": 400, "scripts": 400, "patches": 400, "tests": 600}
FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 12


@pytest.mark.parametrize("folder", FILE_LINES)
def test_a_file_is_one_idea(folder: str) -> None:
    lengths = {name: text.count("\n") for name, text in python_files(folder).items()}
    long = {name: length for name, length in lengths.items() if length > FILE_LINES[folder]}
    assert lengths
    assert not long, f"more than {FILE_LINES[folder]} lines; cut at the second idea"


def test_functions_are_short() -> None:
    lengths = {
        f"{name}:{function}": 1 + (node.end_lineno or 0) - node.lineno
        for name, text in python_files("malleus_megatron", "scripts", "patches").items()
        for function, node in definitions(text)
    }
    long = {name: length for name, length in lengths.items() if length > FUNCTION_LINES}
    assert not long, f"more than {FUNCTION_LINES} lines"
    assert statistics.median(lengths.values()) <= MEDIAN_FUNCTION_LINES


def test_every_module_and_every_public_name_is_described() -> None:
    silent = []
    for name, text in python_files("malleus_megatron", "scripts", "patches").items():
        module = ast.parse(text)
        public = [
            node
            for node in module.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        silent += [name] if ast.get_docstring(module) is None else []
        silent += [f"{name}:{node.name}" for node in public if ast.get_docstring(node) is None]
    assert not silent


def test_every_test_module_says_what_it_tests() -> None:
    silent = [
        name
        for name, text in python_files("tests").items()
        if text.strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert not silent
