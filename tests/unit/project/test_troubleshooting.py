"""docs/troubleshooting.md quotes messages that the code still gives."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


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


def test_each_message_on_the_page_is_in_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    first = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quoted = [text for cell in first for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) >= 20
    said = texts()
    assert [text for text in quoted if text not in said] == []
