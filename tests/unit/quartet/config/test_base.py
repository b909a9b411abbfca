"""Strict configuration: nothing unknown, nothing unexplained, and errors that say what would be right."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

import orchestrator.config.run
import services.critic.config
import services.reference.config
import services.reward.config
import services.rollout.config
from quartet.config.base import Config, ConfigError, ModelPath, Seconds, read_yaml
from tests.unit.configs import problems

MODULES = (
    orchestrator.config.run,
    services.critic.config,
    services.reference.config,
    services.reward.config,
    services.rollout.config,
)


class Leaf(Config):
    kind: Literal["leaf"] = "leaf"
    rate: Annotated[float, Field(gt=0)]
    wait_s: Seconds = 1


class Pair(Config):
    kind: Literal["pair"]
    left: "Tree"
    right: "Tree"


Tree = Annotated[Leaf | Pair, Field(discriminator="kind")]


class Root(Config):
    name: str
    leaf: Leaf = Leaf(rate=1)
    leaves: list[Leaf] = Field(default_factory=list)
    tree: Tree = Leaf(rate=1)


Pair.model_rebuild()
Root.model_rebuild()


def test_values_never_change() -> None:
    root = Root.parse({"name": "a", "leaf": {"rate": 2}}, "root")
    assert (root.name, root.leaf.rate) == ("a", 2.0)
    with pytest.raises(ValidationError, match="frozen"):
        root.name = "b"


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    for path in (tmp_path / "a.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"^configuration: {path} is a pipe, socket or device; it should be a"):
            read_yaml(path)


def test_a_typo_lists_the_fields_there_are() -> None:
    assert problems(Root, {"nmae": "a", "name": "a"}) == [
        "root.nmae: unknown field; known: leaf, leaves, name, tree; did you mean name?"
    ]
    assert problems(Root, {"name": "a", "leaf": {"rate": 1, "rtae": 1}}) == [
        "root.leaf.rtae: unknown field; known: kind, rate, wait_s; did you mean rate?"
    ]
    # Once for each section: those of a whole file of another kind would be a page.
    assert problems(Root, {"name": "a", "leaf": {"rate": 1, "rtae": 1, "wait": 1}, "other": 1}) == [
        "root.leaf.rtae: unknown field; known: kind, rate, wait_s; did you mean rate?",
        "root.leaf.wait: unknown field; did you mean wait_s?",
        "root.other: unknown field; known: leaf, leaves, name, tree",
    ]
    assert problems(Root, {"name": "a", "leaves": [{"rate": 1}, {"rate": 1, "rtae": 1}]}) == [
        "root.leaves.1.rtae: unknown field; known: kind, rate, wait_s; did you mean rate?"
    ]


def test_a_typo_in_a_section_chosen_by_its_kind() -> None:
    leaf = {"kind": "leaf", "rate": 1}
    tree = {"kind": "pair", "left": leaf, "right": {"kind": "pair", "left": leaf, "right": leaf | {"rtae": 1}}}
    assert problems(Root, {"name": "a", "tree": tree}) == [
        "root.tree.right.right.rtae: unknown field; known: kind, rate, wait_s; did you mean rate?"
    ]
    assert problems(Root, {"name": "a", "tree": {"kind": "paar"}}) == [
        "root.tree.kind: should be one of 'leaf', 'pair', got 'paar'"
    ]
    assert problems(Root, {"name": "a", "tree": {"rate": 1}}) == ["root.tree.kind: required"]


def test_a_wrong_word_is_told_of_what_else_there_is() -> None:
    class Choice(Config):
        over: Literal["tokens", "trajectories"] | Annotated[int, Field(ge=1)] | Literal["constant"]

    said = "root.over: should be 'tokens' or 'trajectories', or {}, or 'constant', got {}"
    assert problems(Choice, {"over": "token"}) == [said.format("a whole number", "'token'")]
    assert problems(Choice, {"over": 0}) == [said.format("1 or more", 0)]


def test_every_wrong_field_is_a_line_of_its_own() -> None:
    assert problems(Root, {"leaf": {"rate": 0, "wait_s": "soon"}, "leaves": [{}]}) == [
        "root.name: required",
        "root.leaf.rate: should be more than 0, got 0",
        "root.leaf.wait_s: should be a number, got 'soon'",
        "root.leaves.0.rate: required",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    assert problems(Leaf, {"rate": value}) == [f"root.rate: should be a finite number, got {value}"]


@pytest.mark.parametrize(("values", "shown"), [([1], "[1]"), ("name", "'name'"), (3, "3"), (None, "null")])
def test_a_section_is_a_mapping(values: Any, shown: str) -> None:
    assert problems(Root, values) == [f"root: should be a mapping of fields to values, got {shown}"]


def test_model_paths_are_folders_of_models(tmp_path: Path) -> None:
    class Section(Config):
        model: ModelPath

    missing = tmp_path / "missing"
    assert problems(Section, {"model": str(missing)}) == [
        f"root.model: no such folder on this machine (looked for {missing}), got '{missing}'"
    ]
    assert problems(Section, {"model": str(tmp_path)}) == [
        f"root.model: the folder holds no config.json, so it is not a Hugging Face model, got '{tmp_path}'"
    ]
    (tmp_path / "config.json").write_text("{}")
    assert Section.parse({"model": str(tmp_path)}, "root").model == str(tmp_path)


def sections(kind: type[Config] = Config) -> Iterator[type[Config]]:
    for section in kind.__subclasses__():
        if section.__module__.startswith(("services.", "orchestrator.")):
            yield section
        yield from sections(section)


def test_every_section_and_every_field_is_documented() -> None:
    actual = list(sections())
    assert len(actual) >= 20
    assert {module.__name__ for module in MODULES} <= {section.__module__ for section in actual}
    unexplained = [section.__name__ for section in actual if not vars(section).get("__doc__")]
    unexplained += [
        f"{section.__name__}.{name}"
        for section in actual
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert unexplained == []
