"""Strict configuration: nothing unknown, nothing unexplained, and errors that say what would be right."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

import orchestrator.config
import services.critic.config
import services.reference.config
import services.reward.config
import services.rollout.config
from services.common.config import Config, ConfigError, ModelPath, Seconds, read_yaml
from services.common.learner_config import LearnerConfig, OptimizerConfig, PolicyConfig, describe
from services.reward.config import RewardConfig

MODULES = (
    orchestrator.config,
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


def problems(kind: type[Config], values: Any, where: str = "root") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        kind.parse(values, where)
    return str(caught.value).splitlines()


def test_values_never_change() -> None:
    root = Root.parse({"name": "a", "leaf": {"rate": 2}}, "root")
    assert (root.name, root.leaf.rate) == ("a", 2.0)
    with pytest.raises(ValidationError, match="frozen"):
        root.name = "b"


def test_a_typo_lists_the_fields_there_are() -> None:
    assert problems(Root, {"nmae": "a", "name": "a"}) == [
        "root.nmae: no such field; the fields here are leaf, leaves, name, tree"
    ]
    assert problems(Root, {"name": "a", "leaf": {"rate": 1, "rtae": 1}}) == [
        "root.leaf.rtae: no such field; the fields here are kind, rate, wait_s"
    ]
    assert problems(Root, {"name": "a", "leaves": [{"rate": 1}, {"rate": 1, "rtae": 1}]}) == [
        "root.leaves.1.rtae: no such field; the fields here are kind, rate, wait_s"
    ]


def test_a_typo_in_a_section_chosen_by_its_kind() -> None:
    leaf = {"kind": "leaf", "rate": 1}
    tree = {"kind": "pair", "left": leaf, "right": {"kind": "pair", "left": leaf, "right": leaf | {"rtae": 1}}}
    assert problems(Root, {"name": "a", "tree": tree}) == [
        "root.tree.right.right.rtae: no such field; the fields here are kind, rate, wait_s"
    ]
    assert problems(Root, {"name": "a", "tree": {"kind": "paar"}}) == [
        "root.tree: Input tag 'paar' found using 'kind' does not match any of the expected tags: 'leaf', 'pair'"
    ]


def test_every_wrong_field_is_a_line_of_its_own() -> None:
    assert problems(Root, {"leaf": {"rate": 0, "wait_s": "soon"}, "leaves": [{}]}) == [
        "root.name: required",
        "root.leaf.rate: Input should be greater than 0, got 0",
        "root.leaf.wait_s: Input should be a valid number, unable to parse string as a number, got 'soon'",
        "root.leaves.0.rate: required",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    assert problems(Leaf, {"rate": value}) == [f"root.rate: Input should be a finite number, got {value}"]


@pytest.mark.parametrize("values", [[1], "name", 3, None])
def test_a_section_is_a_mapping(values: Any) -> None:
    assert problems(Root, values) == [f"root: should be a mapping of fields to values, got {values!r}"]


def test_yaml_files(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rate: 1.0e-3\nname: &a x\nother: *a\n")
    assert read_yaml(path) == {"rate": 0.001, "name": "x", "other": "x"}
    for content, message in (
        (b"- 1\n", "should hold a mapping at the top level, got list"),
        (b"", "should hold a mapping at the top level, got NoneType"),
        (b"a: [1\n", "not valid YAML: "),
        (b"a: \xff\n", "not valid YAML: "),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {message}")):
            read_yaml(path)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'b.yaml'}: cannot be read: No such file")):
        read_yaml(tmp_path / "b.yaml")


def test_model_paths_are_folders_of_models(tmp_path: Path) -> None:
    class Section(Config):
        model: ModelPath

    missing = tmp_path / "missing"
    assert problems(Section, {"model": str(missing)}) == [
        f"root.model: no such folder on this machine (looked for {missing}), got '{missing}'"
    ]
    assert problems(Section, {"model": str(tmp_path)}) == [
        f"root.model: the folder holds no config.json, so it is no Hugging Face model, got '{tmp_path}'"
    ]
    (tmp_path / "config.json").write_text("{}")
    assert Section.parse({"model": str(tmp_path)}, "root").model == str(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"learning_rate": 1, "schedule": "cosine"}}, "total_steps is required by schedule: cosine"),
        (
            {"optimizer": {"learning_rate": 1, "warmup_steps": 9, "total_steps": 9}},
            "warmup_steps must be less than total_steps",
        ),
        ({"optimizer": {"learning_rate": 0}}, "learning_rate: Input should be greater than 0, got 0"),
        ({"optimizer": {"learning_rate": 1, "betas": [0.9, 1]}}, "betas.1: Input should be less than 1, got 1"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 with zero_stage 0 drifts from fp32; set zero_stage to 1"),
        ({"dtype": "float16"}, "dtype: Input should be 'float32' or 'bfloat16', got 'float16'"),
        ({"zero_stage": 2}, "zero_stage: Input should be 0 or 1, got 2"),
        ({"optimizer": None}, "optimizer: Input should be a valid dictionary"),
    ],
)
def test_learners_that_cannot_be(model: str, values: dict[str, Any], message: str) -> None:
    lines = problems(LearnerConfig, {"model": model, "optimizer": {"learning_rate": 1}} | values)
    assert len(lines) == 1
    assert message in lines[0]


def test_what_deepspeed_is_told(model: str) -> None:
    config = PolicyConfig(
        model=model,
        dtype="bfloat16",
        zero_stage=1,
        optimizer=OptimizerConfig(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_grad_norm=3),
    )
    told = describe(config)
    assert told["bf16"] == {"enabled": True}
    assert told["zero_optimization"] == {"stage": 1}
    assert told["gradient_clipping"] == 3
    assert told["optimizer"]["type"] == "AdamW"
    assert told["optimizer"]["params"] == {
        "lr": 0.01,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "torch_adam": True,
    }


def test_scorers_nest(model: str) -> None:
    function = {"kind": "function", "function": "a.b:c"}
    blend = {"kind": "blend", "parts": [{"weight": 2, "scorer": function}]}
    outer = {"kind": "blend", "parts": [{"weight": 0.5, "scorer": blend}, {"weight": 1, "scorer": function}]}
    config = RewardConfig.parse({"tokenizer": model, "scorer": outer}, "reward.args")
    assert config.model_dump()["scorer"] == outer
    assert problems(RewardConfig, {"tokenizer": model, "scorer": {"kind": "blend", "parts": []}})[0].startswith(
        "root.scorer.parts: List should have at least 1 item"
    )
    blend["parts"][0]["scorer"] = {"kind": "function", "function": "no path", "funktion": 1}  # type: ignore[index]
    lines = problems(RewardConfig, {"tokenizer": model, "scorer": outer}, "reward.args")
    inner = "reward.args.scorer.parts.0.scorer.parts.0.scorer"
    assert lines[0].startswith(f"{inner}.function: String should match pattern")
    assert lines[1:] == [f"{inner}.funktion: no such field; the fields here are function, kind"]


def sections(kind: type[Config] = Config) -> Iterator[type[Config]]:
    for section in kind.__subclasses__():
        if section.__module__.startswith(("services.", "orchestrator.")):
            yield section
        yield from sections(section)


def test_every_section_and_every_field_is_documented() -> None:
    found = list(sections())
    assert len(found) >= 20
    assert {module.__name__ for module in MODULES} <= {section.__module__ for section in found}
    unexplained = [section.__name__ for section in found if not vars(section).get("__doc__")]
    unexplained += [
        f"{section.__name__}.{name}"
        for section in found
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert unexplained == []
