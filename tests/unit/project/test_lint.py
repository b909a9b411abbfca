"""The checks of `make lint` find what they look for."""

import ast
from pathlib import Path

import pytest

from tests.lint import dependencies, pages, privates, prose


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("What the push needs.", "1: opens with 'What'"),
        ("Waits until nobody asks.", "1: 'nobody'"),
        ("See Sender.", "1: 'See Sender.' says nothing by itself"),
        ("Sends the weights; returns when all replicas have them.", ""),
    ],
)
def test_riddles_in_docstrings(text: str, complaint: str) -> None:
    assert prose.complaints(f'"""{text}"""') == [complaint] * bool(complaint)


def test_pages_that_name_what_is_not_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`orchestrator/cli.py`, `orchestrator/none.py`, [here](page.md#top), [there](away.md)")
    assert set(pages.missing(page)) == {str(tmp_path / "away.md"), str(pages.ROOT / "orchestrator/none.py")}
    row = "| x | `orchestrator/cli.py` | `main`, `none` |\n"
    assert (
        list(pages.unknown_functions(row * 10)) == ["docs/architecture.md: none is not in `orchestrator/cli.py`"] * 10
    )


def test_imports_that_are_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "DISTRIBUTIONS", dependencies.DISTRIBUTIONS | {"yaml": "ruamel"})
    dependencies.imported.cache_clear()
    found = list(dependencies.check())
    dependencies.imported.cache_clear()
    assert "pyproject.toml: ruamel is imported by shipped code, but not declared" in found
    assert "pyproject.toml: pyyaml is declared, but not imported" in found


def test_private_names_of_other_libraries() -> None:
    source = """
import os
from torch import nn
from ray.serve._private import replica
from vllm import _custom_ops
from quartet.folders import _ours
class Own:
    def __init__(self):
        self._kept = nn.modules._DropoutNd
        os._exit(1)
    def own(self, other):
        return other._kept, nn._kept, other._theirs, getattr(other, "_more", None), other.__class__
"""
    tree = ast.parse(source)
    assert {line.partition(": ")[2] for line in privates.privates(tree, privates.defined(tree))} == {
        "from ray.serve._private import replica",
        "from vllm import _custom_ops",
        "nn._kept",
        "nn.modules._DropoutNd",
        "other._theirs",
        "getattr(other, '_more', None)",
    }
