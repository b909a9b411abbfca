"""Algorithms are named in their own files and in the registry, and nowhere else in the product."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest

from orchestrator.algorithms import registry
from orchestrator.algorithms.contract import Algorithm, Clip
from orchestrator.algorithms.registry import DEFAULT, Rows, algorithms, parse
from quartet.config.base import ConfigError

ROOT = Path(__file__).parents[4]
FILES = sorted(
    path for room in ("orchestrator", "quartet", "services", "recipes") for path in (ROOT / room).rglob("*.py")
)
GENERAL = {"ppo"}
"""Kinds whose names are words for something wider, which any text may use."""
BOUNDS = {"orchestrator/algorithms/contract.py", "orchestrator/algorithms/loss.py"}
"""Files that name the values of the setting `clip`, two of which are called like the kinds that they come from."""


def own_file(algorithm: type[Algorithm]) -> Path:
    return Path(str(sys.modules[algorithm.__module__].__file__))


def names(path: Path) -> Iterator[str]:
    """Names of algorithms in a file: kinds as texts, classes and their modules as code, and other kinds anywhere."""
    text = path.read_text()
    kinds = algorithms().keys() - ({*get_args(Clip)} if str(path.relative_to(ROOT)) in BOUNDS else set())
    words = "|".join(re.escape(kind) for kind in sorted(kinds - GENERAL, key=len, reverse=True))
    yield from re.findall(rf"(?<![\w/])(?:{words})(?![\w+])", text)
    codes = {each.__name__ for each in algorithms().values()} | {each.__module__ for each in algorithms().values()}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(value)) if value in kinds:
                yield value
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.ImportFrom(module=name):
                if name in codes:
                    yield str(name)


def test_only_an_algorithms_own_file_and_the_registry_name_it() -> None:
    own = {own_file(each) for each in algorithms().values()}
    assert len(own) == len(algorithms())
    found = {str(path.relative_to(ROOT)): sorted({*names(path)}) for path in FILES if path not in own}
    assert {path for path, named in found.items() if named} == {"orchestrator/algorithms/registry.py"}
    for kind, each in algorithms().items():
        others = algorithms().keys() - GENERAL - {kind}
        assert not others & {*names(own_file(each))}


def test_each_row_has_the_kind_of_its_class_and_every_class_a_row() -> None:
    assert [next(iter(row.__metadata__)).tag for row in get_args(Rows)] == [*algorithms()]
    assert all(get_origin(row) is Annotated for row in get_args(Rows))
    assert {*Algorithm.__subclasses__()} >= {*algorithms().values()}
    files = {path.stem for path in (ROOT / "orchestrator" / "algorithms").glob("*.py")}
    modules = {each.__module__.rpartition(".")[2] for each in algorithms().values()}
    arithmetic = {
        "__init__",
        "contract",
        "registry",
        "responses",
        "advantages",
        "groups",
        "kl",
        "loss",
        "named",
        "off_policy",
        "rewards",
    }
    assert files == modules | arithmetic


@pytest.mark.parametrize("kind", algorithms())
def test_a_file_that_sets_the_kind_alone_has_what_the_kind_needs(kind: str) -> None:
    algorithm = parse({"kind": kind})
    assert type(algorithm) is algorithms()[kind]
    assert algorithm.kind == kind
    assert algorithm.samples_per_prompt >= algorithm.needs_samples_per_prompt
    assert parse(algorithm.model_dump(mode="json")) == algorithm
    assert kind in registry.kinds(critic=algorithm.needs_critic)
    assert kind not in registry.kinds(critic=not algorithm.needs_critic).split(" ")


def test_a_section_without_a_kind_is_the_default_and_wrong_ones_are_refused() -> None:
    assert parse(None) == parse({}) == DEFAULT
    assert parse({"epochs": 3}) == DEFAULT.model_copy(update={"epochs": 3})
    for section, message in (
        ({"kind": 3}, r"^algorithm\.kind: should be one of"),
        (3, r"^algorithm: should be a mapping"),
        ({"kind": "rloo", "whiten": False}, r"^algorithm\.whiten: unknown field; known: "),
        (
            {"kind": "rloo", "samples_per_prompt": 1},
            r"^algorithm: baseline leave-one-out compares the responses .* must be 2 or more, got 1$",
        ),
        ({"epochs": 0}, r"^algorithm\.epochs: should be 1 or more, got 0$"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(section)


@pytest.mark.processes
def test_the_classes_load_no_torch() -> None:
    program = "import sys, orchestrator.algorithms.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
