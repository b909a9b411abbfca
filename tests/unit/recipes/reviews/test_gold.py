"""The gold scorer of the reviews against scores worked out by hand."""

import pytest

from quartet.wire.pairs import Pair
from recipes.reviews import gold

PHONE = "write a short review of the phone for students :"  # battery, screen, sound, price


def worth(response: str, prompt: str = PHONE, ended: bool = True) -> float:
    (score,) = gold.score([Pair(prompt, response, ended=ended)])
    return score


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("the battery is durable . the screen is very bright .", 1.0),  # (1 + 1) / 2
        ("the battery is weak . the screen is okay .", -0.5),  # (-1 + 0) / 2
        ("the battery is okay . the screen seems quite average .", 0.0),
        ("the battery is dying . the screen is dim . the price is fair .", -1 / 3),
    ],
)
def test_a_flawless_review_is_worth_its_mean_polarity(response: str, expected: float) -> None:
    assert worth(response) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("the fabric is soft . the price is fair .", 0.375),  # praise off topic: (0 - 1/4 + 1) / 2
        ("the motor is okay . the price is fair .", 0.375),  # neutral off topic: the same
        ("the motor is noisy . the price is fair .", -0.125),  # blame off topic: (-1 - 1/4 + 1) / 2
        ("the battery is crisp . the price is fair .", 0.375),  # a screen's adjective
        ("the fabric is crisp . the price is fair .", 0.375),  # both wrong is one fault
    ],
)
def test_an_aspect_or_adjective_off_topic_is_a_fault(response: str, expected: float) -> None:
    assert worth(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("the price is fair . the price seems really cheap .", 0.375),  # (1 + (0 - 1/4)) / 2
        ("the price is fair . the price is steep .", -0.125),  # (1 + (-1 - 1/4)) / 2
        ("the motor is quiet . the motor is strong .", -0.375),  # (-1/4 + (0 - 2/4)) / 2
    ],
)
def test_repeating_an_aspect_is_a_fault(response: str, expected: float) -> None:
    assert worth(response) == expected


@pytest.mark.parametrize(
    "broken",
    [
        "battery is durable",
        "the battery durable",
        "the battery is very really durable",
        "the battery is durable very",
        "the battery is for durable",
        "the durable is battery",
        "the phone is durable",
        "a battery is durable",
        "the battery is <unk>",
        "",
    ],
)
def test_a_sentence_outside_the_grammar_is_worth_minus_one(broken: str) -> None:
    assert worth(f"{broken} . the screen is bright .") == 0.0  # (-1 + 1) / 2


def test_a_broken_sentence_does_not_use_up_its_aspect() -> None:
    assert worth("the price fair . the price is fair .") == 0.0  # (-1 + 1) / 2 and no repetition


def test_a_bad_ending_costs_a_half_once() -> None:
    good = "the battery is durable . the screen is bright ."
    assert worth(good, ended=False) == 0.5
    assert worth(good + " the") == 0.5
    assert worth(good + " the", ended=False) == 0.5


def test_too_few_or_too_many_sentences_cost_a_quarter() -> None:
    four = "the battery is durable . the screen is bright . the sound is clear . the price is fair ."
    assert worth("the price is fair .") == 0.75  # 1 - 1/4
    assert worth("the price is fair .", ended=False) == 0.25  # 1 - 1/4 - 1/2
    assert worth(four) == 1.0
    assert worth(four + " the price is cheap .") == 0.5  # (4 - 1/4) / 5 - 1/4


def test_the_worth_is_clamped_at_minus_one() -> None:
    # (-1 - 1/4 + -1 - 2/4) / 2 - 1/2 = -1.875
    assert worth("the motor is noisy . the motor is feeble .", ended=False) == -1.0


@pytest.mark.parametrize("response", ["", "the price is fair", "very very very"])
def test_without_a_finished_sentence_the_worth_is_minus_one(response: str) -> None:
    assert worth(response) == -1.0


def test_the_product_decides_and_tone_and_audience_do_not() -> None:
    response = "the wheels is fast . the zipper is smooth ."
    assert worth(response, "write a frank review of the suitcase for experts :") == 1.0
    assert worth(response, "write a useful review of the suitcase for parents :") == 1.0
    assert worth(response, PHONE) == -0.25


def test_scores_keep_the_order_of_the_pairs() -> None:
    pairs = [Pair(PHONE, ""), Pair(PHONE, "the price is fair ."), Pair(PHONE, "the price is steep .")]
    assert gold.score(pairs) == [-1.0, 0.75, -1.0]
    assert gold.score([]) == []


@pytest.mark.parametrize(
    "prompt",
    [
        "hello",
        "write a short review of the moon for students :",
        "write a rude review of the phone for students :",
        "write a short review of the phone for nobody :",
    ],
)
def test_a_prompt_that_asks_for_no_review_is_named(prompt: str) -> None:
    with pytest.raises(ValueError, match=f"prompt: '{prompt}' asks for no review"):
        worth("the price is fair .", prompt)
