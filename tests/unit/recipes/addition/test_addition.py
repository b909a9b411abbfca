"""The addition recipe: its rule against scores worked out by hand, its problems, and a tiny run."""

import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet.wire.pairs import Pair
from recipes.addition.make import make
from recipes.addition.problems import Problem, careless_answer, split_problems
from recipes.addition.reward import score
from recipes.addition.settings import Settings
from recipes.common.shape import Shape

pytestmark = pytest.mark.processes


def reward(response: str, label: str = "42", ended: bool = True) -> float:
    (one,) = score([Pair("17 + 25 =", response, label, ended)])
    return one


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("42", 1.0),
        (" 42", 1.0),  # a blank before the number is not held against it
        ("43", 0.25),  # one digit of two: 1/2 x 1/2
        ("52", 0.25),
        ("24", 0.0),  # both digits, neither in its place
        ("2", -1.0),
        ("042", -1.0),
        ("4 2", -1.0),
        ("42 =", -1.0),
        ("-2", -1.0),
        ("²2", -1.0),  # a digit to Unicode, not to arithmetic
        ("", -1.0),
    ],
)
def test_the_rule(response: str, expected: float) -> None:
    assert reward(response) == expected


def test_an_answer_that_does_not_end_is_rubbish() -> None:
    assert reward("42", ended=False) == -1.0


def test_a_share_of_three_digits() -> None:
    assert reward("142", label="152") == pytest.approx(1 / 3)  # 1/2 x 2/3


def test_scores_keep_the_order_of_the_pairs() -> None:
    assert score([Pair("", "1", "1"), Pair("", "x", "1"), Pair("", "2", "1")]) == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("label", ["", "forty-two", "4.2"])
def test_a_label_that_is_not_a_number_is_named(label: str) -> None:
    with pytest.raises(ValueError, match=f"label: must be the sum .*, not '{label}'"):
        reward("42", label)


def test_problems_are_of_two_digits_with_their_sum_as_label() -> None:
    train, held_out = split_problems(seed=0, train=3000, held_out=240)
    assert len({*train, *held_out}) == 3240  # 80 + 79 + ... + 1: all there are
    assert all(min(one.left, one.right) >= 10 and one.left + one.right <= 99 for one in train + held_out)
    assert (Problem(17, 25).text, Problem(17, 25).label) == ("17 + 25 =", "42")


def test_the_split_depends_on_the_seed_alone() -> None:
    assert split_problems(0, 100, 50) == split_problems(0, 100, 50)
    assert split_problems(0, 100, 50) != split_problems(1, 100, 50)


def test_a_split_of_more_problems_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train \+ held_out: 3000 \+ 241 problems wanted, 3240 exist"):
        split_problems(0, 3000, 241)


def test_a_slip_replaces_one_digit() -> None:
    rng = random.Random(0)
    assert {careless_answer(Problem(17, 25), 0.0, rng) for _ in range(100)} == {"42"}
    slips = {careless_answer(Problem(17, 25), 1.0, rng) for _ in range(1000)}
    assert slips == {f"{ten}2" for ten in "012356789"} | {f"4{one}" for one in "013456789"}
    right = sum(careless_answer(Problem(17, 25), 0.3, rng) == "42" for _ in range(4000)) / 4000
    assert right == pytest.approx(0.7, abs=0.03)


def test_a_tiny_run_and_its_cache(tmp_path: Path) -> None:
    settings = Settings(shape=Shape(hidden=16, layers=1, heads=2), steps=10, batch=16, held_out_problems=40)
    assert make(tmp_path, settings, Console(file=io.StringIO()))
    assert not make(tmp_path, settings, Console(file=io.StringIO()))
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert policy.config.vocab_size == len(tokenizer) == 17  # 4 special tokens and 13 characters
    assert tokenizer.decode(tokenizer("17 + 25 =").input_ids, skip_special_tokens=True) == "17 + 25 ="
    rows = [json.loads(line) for line in (tmp_path / "prompts" / "eval.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    for row in rows:
        left, right = row["prompt"].removesuffix(" =").split(" + ")
        assert row == {"prompt": f"{left} + {right} =", "label": str(int(left) + int(right))}
    measures = json.loads((tmp_path / "recipe.json").read_text())["measures"]
    assert measures.keys() == {"policy_reward", "policy_exact"}
