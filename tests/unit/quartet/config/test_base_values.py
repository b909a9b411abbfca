"""Messages about values of the wrong kind, and about text that is not YAML."""

import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from quartet.config.base import Config, ConfigError, read_yaml
from tests.unit.configs import problems


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


def test_a_section_that_holds_itself_is_refused() -> None:
    env: dict[str, Any] = {}
    env["A"] = env
    (line,) = problems(Numbers, {"env": env})
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a: 1\n\tb: 2\n", ": not valid YAML: line 2, column 1: while scanning for the next token found character "),
        ("a: [1\nb: 2\n", ": not valid YAML: line 2, column 2: while parsing a flow sequence "),
        ("a: 2024-02-31\n", ": not valid YAML: day is out of range for month"),
    ],
)
def test_what_is_not_yaml_is_found_by_its_file_and_line(tmp_path: Path, text: str, shown: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}{shown}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; YAML is indented by blanks") == ("\t" in text)


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ALIASES, "holds more than 100000 values, each alias (*name) counted with its contents"),
        (MERGES, "holds more than 100000 values, each alias (*name) counted with its contents"),
        ("a: &a {b: *a}\n", "holds values in values, on more than 64 levels"),
        ("a: " + "[" * 100 + "]" * 100 + "\n", "holds values in values, on more than 64 levels"),
        ("a: " + "[" * 100_000 + "\n", "holds values in values, on more than 64 levels"),
        ("a: " + "x" * (5 << 20) + "\n", "holds 5.0 MiB, where 4 are the most"),
    ],
    ids=["aliases", "merges", "itself", "deep", "deeper", "long"],
)
def test_small_files_that_stand_for_much_are_refused_at_once(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value) == f"{path}: {said}"
    assert time.monotonic() - begun < 20
