"""Limits on the size of files, functions and folders, so that each can be read in one go."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = sorted(path for package in ("orchestrator", "services", "recipes") for path in (ROOT / package).rglob("*.py"))

FILE_LINES = 250
FUNCTION_LINES = 50
FOLDER_FILES = 12


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines, signature and docstring included, of each function and method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {f"{path.relative_to(ROOT)}:{name}": n for path in FILES for name, n in functions(path.read_text())}
    assert {name: count for name, count in long.items() if count > FUNCTION_LINES} == {}


def test_folders_hold_few_files() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in FILES)
    assert {folder: count for folder, count in counts.items() if count > FOLDER_FILES} == {}


def test_a_functions_lines_are_counted_from_its_signature_to_its_end() -> None:
    assert dict(functions("def f(\n    x,\n):\n    '''Text.'''\n    return x\n")) == {"f": 5}
