"""Docstrings are plain English: they open with a verb or a noun and hold none of the words that make riddles."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("orchestrator", "quartet", "services", "recipes", "benchmarks", "tests")
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_are_plain_english(path: Path) -> None:
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("What the push needs.", "1: opens with 'What'"),
        ("Waits until nobody asks.", "1: 'nobody'"),
        ("True if it is no checkpoint.", "1: 'is no'"),
        ("Makes processes that are no Ray.", "1: 'are no'"),
        ("How often it waits.", "1: opens with 'How'"),
        ("See Sender.", "1: 'See Sender.' says nothing by itself"),
    ],
)
def test_a_riddle_is_found(text: str, complaint: str) -> None:
    assert complaints(f'"""{text}"""') == [complaint]


def test_plain_english_passes() -> None:
    assert complaints('def f():\n    """Sends the weights; returns when all replicas have them."""') == []
