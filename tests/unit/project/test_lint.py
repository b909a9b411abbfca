"""The checks of `make lint` find what they look for."""

import ast
from pathlib import Path

from tests.lint import pages, privates
from tests.lint.pages import ROOT


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


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """Folders that are not shipped count too."""
    page = tmp_path / "page.md"
    page.write_text("`examples/agent.py`, `examples/gone.py`, tests/gone.py, `constraints/gpu.txt`, [away](away.md)")
    gone = ROOT / "examples/gone.py", ROOT / "tests/gone.py", tmp_path / "away.md"
    assert pages.missing(page) == sorted(map(str, gone))


def test_commands_that_are_not_there() -> None:
    text = """
`python -m benchmarks.push --mib 1`, `python -m
benchmarks.gone`, `benchmarks.learner step`, `benchmarks.lost step`, python -m tests.chaos, `python -m pytest`,
python -m tests.pages and `python -m benchmarks.NAME`.
"""
    assert pages.no_commands(text) == ["benchmarks.gone", "benchmarks.lost", "tests.pages"]
