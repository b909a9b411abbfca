"""Docstrings are plain English: they open with a verb or a noun and hold none of the words that make riddles."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "quartet", "services", "recipes", "examples", "benchmarks", "tests")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

WORDS = re.compile(
    r"\b(nobody|somebody|anybody|everybody|whoever|whichever|anew|afresh|is no|are no)\b", re.IGNORECASE
)
OPENERS = re.compile(
    r"(What|Of|Where|When|Who|Whose|Whom|That|Which|Whether|How|Why|If|So|As|By|And|Also|It|Its|They|Those|There"
    r"|Not|None|Else)\b"
)
POINTER = re.compile(r"See [\w`.']+[.;:,]?( .{0,30})?")
"""A docstring that only names another place, such as "See Sender."."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone: of modules, classes and functions, and below fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def complaints(source: str) -> list[str]:
    """One line per docstring that breaks a rule: its line number and the words in question."""
    actual = []
    for line, text in docstrings(source):
        if word := WORDS.search(text):
            actual.append(f"{line}: {word.group()!r}")
        if opener := OPENERS.match(text):
            actual.append(f"{line}: opens with {opener.group()!r}")
        if POINTER.fullmatch(text):
            actual.append(f"{line}: {text!r} says nothing by itself")
    return actual


def check() -> Iterator[str]:
    """A line for each complaint about any file."""
    for path in FILES:
        yield from (f"{path.relative_to(ROOT)}:{complaint}" for complaint in complaints(path.read_text()))
