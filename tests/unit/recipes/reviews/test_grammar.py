"""The language of the reviews and its tokenizer."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from recipes.common.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, character_tokenizer, word_tokenizer
from recipes.reviews.grammar import (
    ASPECTS,
    OPINIONS,
    PRODUCTS,
    WORDS,
    Prompt,
    Sentence,
    Style,
    split_prompts,
    write_review,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(WORDS, max_length=128)


def sentences(review: str) -> list[Sentence]:
    parts = review.removesuffix(" .").split(" . ")
    parsed = [Sentence.parse(part.split()) for part in parts]
    assert None not in parsed
    return [sentence for sentence in parsed if sentence is not None]


def test_the_language_has_the_documented_size() -> None:
    assert len(WORDS) == 102  # and four special tokens
    assert len(OPINIONS) == 12 * 4 + 2  # no adjective stands for two aspects
    assert all(len(set(aspects)) == 4 and set(aspects) <= set(ASPECTS) for aspects in PRODUCTS.values())


def test_special_tokens_have_the_documented_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<unk>"]) == [0, 1, 2, 3]
    assert (PAD_ID, BOS_ID, EOS_ID, UNK_ID) == (0, 1, 2, 3)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 106


def test_every_prompt_survives_tokenizer_and_parser(tokenizer: PreTrainedTokenizerFast) -> None:
    for prompt in split_prompts(seed=0, held_out=0.25)[0]:
        ids = tokenizer(prompt.text).input_ids
        assert ids[0] == BOS_ID
        assert len(ids) == 11  # <bos> and the 10 words
        assert min(ids[1:]) > UNK_ID
        assert tokenizer(prompt.text, add_special_tokens=False).input_ids == ids[1:]
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt.text
        assert Prompt.parse(prompt.text) == prompt


def test_every_review_survives_tokenizer_and_parser(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    lengths = set()
    for _ in range(200):
        review = write_review(Prompt("short", "radio", "experts"), Style(), rng)
        ids = tokenizer(review, add_special_tokens=False).input_ids
        assert min(ids) > UNK_ID
        assert tokenizer.decode(ids) == review
        parsed = sentences(review)
        assert " ".join(sentence.text for sentence in parsed) == review
        lengths.add(len(parsed))
    assert lengths == {2, 3, 4}


def test_a_style_without_chance_says_what_it_says() -> None:
    rng = random.Random(0)
    prompt = Prompt("short", "coffee", "parents")
    for praise, neutral, polarity in ((1.0, 0.0, 1), (0.0, 0.0, -1), (0.5, 1.0, 0)):
        for _ in range(50):
            for sentence in sentences(write_review(prompt, Style(praise, 0.0, neutral), rng)):
                opinion = OPINIONS[sentence.adjective]
                assert sentence.aspect in ("taste", "smell", "price", "cover")
                assert opinion.polarity == polarity
                assert opinion.aspect in (None, sentence.aspect)


def test_slips_are_as_frequent_as_the_style_says() -> None:
    rng = random.Random(0)
    reviews = [write_review(Prompt("short", "coffee", "parents"), Style(slip=0.3), rng) for _ in range(2000)]
    aspects = [sentence.aspect for review in reviews for sentence in sentences(review)]
    foreign = sum(aspect not in PRODUCTS["coffee"] for aspect in aspects) / len(aspects)
    assert foreign == pytest.approx(0.3 * 8 / 12, abs=0.02)  # a slip still hits one of the product's 4 of 12


def test_the_split_is_complete_disjoint_and_depends_on_the_seed_alone() -> None:
    train, held_out = split_prompts(seed=0, held_out=0.25)
    assert (len(train), len(held_out)) == (288, 96)  # of 6 tones x 16 products x 4 audiences
    assert len({*train, *held_out}) == 384
    assert split_prompts(seed=0, held_out=0.25) == (train, held_out)
    assert set(split_prompts(seed=1, held_out=0.25)[1]) != set(held_out)


def test_characters_survive_the_tokenizer_blanks_included() -> None:
    tokenizer = character_tokenizer("0123456789 +=", max_length=128)
    ids = tokenizer("17 + 25 =").input_ids
    assert ids == [1, 5, 11, 14, 15, 14, 6, 9, 14, 16]  # digit d is 4 + d, then blank 14, plus 15, equals 16
    assert tokenizer.decode(ids, skip_special_tokens=True) == "17 + 25 ="
    assert tokenizer.decode([8, 6, EOS_ID], skip_special_tokens=True) == "42"


def test_a_vocabulary_with_a_repeated_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary: each entry must occur once; repeated: <eos>, b"):
        word_tokenizer(["a", "b", "b", "<eos>"], max_length=8)
