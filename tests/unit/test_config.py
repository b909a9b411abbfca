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
        "root.nmae: unknown field; known: leaf, leaves, name, tree; did you mean name?"
    ]
    assert problems(Root, {"name": "a", "leaf": {"rate": 1, "rtae": 1}}) == [
        "root.leaf.rtae: unknown field; known: kind, rate, wait_s; did you mean rate?"
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
        ({"optimizer": {"learning_rate": 0}}, "learning_rate: should be more than 0, got 0"),
        ({"optimizer": {"learning_rate": 1, "betas": [0.9, 1]}}, "betas.1: should be less than 1, got 1"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 with zero_stage 0 drifts from fp32; set zero_stage to 1"),
        ({"dtype": "float16"}, "dtype: should be 'float32' or 'bfloat16', got 'float16'"),
        ({"zero_stage": 9}, "zero_stage: should be 0"),
        ({"ranks": 0}, "ranks: should be 1 or more, got 0"),
        ({"adam_offload": True}, "adam_offload is part of ZeRO; set zero_stage to 1, 2 or 3"),
        ({"param_offload": True, "zero_stage": 2}, "param_offload is part of ZeRO 3; set zero_stage to 3"),
        ({"attn_implementation": "flash"}, "attn_implementation: should be 'sdpa', 'eager' or 'flash_attention_2'"),
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation flash_attention_2 computes in half precision; set dtype to bfloat16",
        ),
        ({"optimizer": None}, "optimizer: should be a mapping of fields to values, got null"),
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
    assert told["gradient_accumulation_steps"] == 1
    assert told["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 50_000_000}
    assert told["gradient_clipping"] == 3
    assert told["optimizer"]["type"] == "AdamW"
    assert told["optimizer"]["params"] == {
        "lr": 0.01,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "torch_adam": True,
        "fused": True,
    }


def test_what_deepspeed_is_told_of_zero_3_with_offload(model: str) -> None:
    config = PolicyConfig(
        model=model,
        zero_stage=3,
        zero_persist_below=7,
        adam_offload=True,
        param_offload=True,
        optimizer=OptimizerConfig(learning_rate=0.01),
    )
    assert describe(config)["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    }


def test_scorers_nest(model: str) -> None:
    function = {"kind": "function", "function": "a.b:c"}
    blend = {"kind": "blend", "parts": [{"weight": 2, "scorer": function}]}
    outer = {"kind": "blend", "parts": [{"weight": 0.5, "scorer": blend}, {"weight": 1, "scorer": function}]}
    config = RewardConfig.parse({"tokenizer": model, "scorer": outer}, "reward.args")
    assert config.model_dump()["scorer"] == outer
    assert problems(RewardConfig, {"tokenizer": model, "scorer": {"kind": "blend", "parts": []}})[0].startswith(
        "root.scorer.parts: should have 1 or more items, got []"
    )
    blend["parts"][0]["scorer"] = {"kind": "function", "function": "no path", "funktion": 1}  # type: ignore[index]
    lines = problems(RewardConfig, {"tokenizer": model, "scorer": outer}, "reward.args")
    inner = "reward.args.scorer.parts.0.scorer.parts.0.scorer"
    assert lines[0].startswith(f"{inner}.function: should be package.module:function, got 'no path'")
    assert lines[1:] == [f"{inner}.funktion: unknown field; known: function, kind; did you mean function?"]


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


class Numbers(Config):
    count: Annotated[int, Field(ge=1, le=9)] = 1
    rate: float = 1
    share: Annotated[float, Field(lt=1)] = 0.5
    on: bool = False
    text: str = ""
    stage: Literal[0, 1] = 0
    env: dict[str, str] = Field(default_factory=dict)
    pair: tuple[float, float] = (0, 1)
    many: list[int] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": True}, "count: should be a whole number, got true"),
        ({"count": 2.0}, "count: should be a whole number, got 2.0"),
        ({"count": "1e2"}, "count: should be a whole number, got '1e2', which is text; write 100"),
        ({"count": "4"}, "count: should be a whole number, got '4', which is text; write 4"),
        ({"count": None}, "count: should be a whole number, got null"),
        ({"count": 10}, "count: should be 9 or less, got 10"),
        ({"rate": False}, "rate: should be a number, got false"),
        ({"rate": "1e-3"}, "rate: should be a number, got '1e-3', which YAML reads as text; write 1.0e-3"),
        ({"rate": "2.5E6"}, "rate: should be a number, got '2.5E6', which YAML reads as text; write 2.5e+6"),
        ({"rate": "0.5"}, "rate: should be a number, got '0.5', which is text; write 0.5 without quotes"),
        ({"rate": "fast"}, "rate: should be a number, got 'fast'"),
        ({"share": 1}, "share: should be less than 1, got 1"),
        ({"on": "yes, please"}, "on: should be true or false, got 'yes, please'"),
        ({"on": 1}, "on: should be true or false, got 1"),
        ({"text": 3}, "text: should be text, got 3; put it in quotes: \"3\""),
        ({"env": {"A": True}}, "env.A: should be text, got true; put it in quotes: \"true\""),
        ({"env": 3}, "env: should be a mapping, got 3"),
        ({"stage": True}, "stage: should be a number, got true or false"),
        ({"stage": 2}, "stage: should be 0 or 1, got 2"),
        ({"pair": [1, 2, 3]}, "pair: should have 2 or fewer items, got [1, 2, 3]"),
        ({"pair": [1]}, "pair.1: required"),
        ({"many": 1}, "many: should be a list, got 1"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_wrong_value(values: dict[str, Any], message: str) -> None:
    assert problems(Numbers, values) == [f"root.{message}"]


def test_whole_numbers_are_numbers_and_lists_may_be_pairs() -> None:
    parsed = Numbers.parse({"rate": 3, "pair": [1, 2.5]}, "root")
    assert (parsed.rate, parsed.pair) == (3.0, (1.0, 2.5))
    assert isinstance(parsed.rate, float)


@pytest.mark.parametrize(("text", "number"), [("1e-3", "1.0e-3"), ("2.5E6", "2.5e+6"), ("-3e4", "-3.0e+4")])
def test_the_number_that_is_proposed_is_one_to_yaml(text: str, number: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"rate: {text}\n")
    (line,) = problems(Numbers, read_yaml(path))
    assert line.endswith(f"write {number}")
    path.write_text(f"rate: {number}\n")
    assert Numbers.parse(read_yaml(path), "root").rate == float(text)


def test_a_section_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("env: &env {A: *env}\n")
    (line,) = problems(Numbers, read_yaml(path))
    assert line.startswith("root: should hold plain values under plain names: ")


def test_a_key_given_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value) == f"{path}, line 5: c is given already in line 3; keep one"
    path.write_text("a: [{x: 1, x: 2}]\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}, line 1: x is given already in line 1; keep one")):
        read_yaml(path)


def test_merged_keys_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "a: &a {x: 1, y: 1}\n"
        "b: {deep: {deeper: &b {<<: *a, x: 2}}}\n"
        "c: {<<: [*b, *a], z: 3}\n"
        "d: {x: 5, <<: *b}\n"
        "e: *a\n"
    )  # fmt: skip
    loaded = read_yaml(path)
    assert loaded["b"]["deep"]["deeper"] == {"x": 2, "y": 1}
    assert loaded["c"] == {"x": 2, "y": 1, "z": 3}
    assert loaded["d"] == {"x": 5, "y": 1}
    assert loaded["e"] == loaded["a"] == {"x": 1, "y": 1}


@pytest.mark.parametrize("content", ["a: !!python/object/apply:os.getcwd []\n", "a: 2024-13-45\n"])
def test_yaml_that_makes_no_plain_value_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not valid YAML: ")):
        read_yaml(path)
