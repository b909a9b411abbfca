"""The documentation names files, functions and pages that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = r"`((?:orchestrator|services|protos|deploy|recipes|benchmarks|tests)/[\w./-]+)`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = {ROOT / name for name in re.findall(CODE, text) if "<" not in name}
    linked = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
    assert not [str(path) for path in named | linked if not path.exists()]


def test_the_way_of_a_sample_names_functions_that_exist() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| (`[^|]+`) \| (`[^|]+`) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 10
    for files, functions in rows:
        defined = set[str]()
        for name in re.findall(r"`([^`]+)`", files):
            path = ROOT / name
            for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
                defined |= _definitions(file)
        for function in re.findall(r"`([^`]+)`", functions):
            assert function in defined, f"{function} is not in {files}"


def _definitions(file: Path) -> set[str]:
    """Names of functions, and `Class.method` of methods."""
    actual = set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            actual.add(node.name)
        if isinstance(node, ast.ClassDef):
            actual |= {
                f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return actual
