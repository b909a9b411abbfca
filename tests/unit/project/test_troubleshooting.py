"""The pages quote messages that the code still gives."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@functools.cache
def texts() -> str:
    """All texts in the code, those of f-strings with a gap for each value."""
    found = []
    for folder in ("orchestrator", "quartet", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    found.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def pattern(quoted: str) -> str:
    """The expression of a message in which `...`, texts in quotes, numbers and FILE stand for values."""
    parts = re.split(r"\.\.\.|'[^']*'|\b\d+\b|\bFILE\b", quoted)
    return ".{0,40}".join(map(re.escape, parts))


@pytest.mark.parametrize(
    ("page", "least"), [("troubleshooting.md", 20), ("before-ppo.md", 8), ("evaluate.md", 5), ("quickstart.md", 6)]
)
def test_each_message_on_a_page_is_in_the_code(page: str, least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    rows = (text if page == "troubleshooting.md" else text.partition("## When it fails")[2]).splitlines()
    first = [re.split(r" \| ", line)[0] for line in rows if line.startswith("| `")]
    quoted = [text for cell in first for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) >= least
    said = texts()
    assert [text for text in quoted if not re.search(pattern(text), said)] == []
