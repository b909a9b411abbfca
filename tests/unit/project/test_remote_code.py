"""No call of transformers leaves it open whether a model folder's own code runs: it would ask the user."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOADERS = {"from_pretrained", "from_config"}
WITHOUT_CODE = {"GenerationConfig"}
"""Classes that read plain values and have no such argument."""


def open_calls(source: str) -> Iterator[int]:
    """Lines of calls that load a configuration, a tokenizer or a model without `trust_remote_code=False`."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id in WITHOUT_CODE:
            continue
        values = [key.value for key in node.keywords if key.arg == "trust_remote_code"]
        if not (values and isinstance(values[0], ast.Constant) and values[0].value is False):
            yield node.lineno


def test_every_call_refuses_the_folders_code() -> None:
    found = []
    calls = 0
    for folder in ("orchestrator", "quartet", "services", "recipes", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            calls += source.count(".from_pretrained(") + source.count(".from_config(")
            found += [f"{path.relative_to(ROOT)}:{line}" for line in open_calls(source)]
    assert calls >= 5
    assert found == []


@pytest.mark.parametrize(
    "call",
    [
        "AutoConfig.from_pretrained(path)",
        "kind.from_pretrained(path, **options)",
        "AutoModel.from_config(config, trust_remote_code=True)",
        "AutoModel.from_config(config, trust_remote_code=asked)",
    ],
)
def test_calls_that_leave_it_open_are_found(call: str) -> None:
    assert list(open_calls(call)) == [1]
    assert list(open_calls("kind.from_pretrained(path, trust_remote_code=False, **options)")) == []
