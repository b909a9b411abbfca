"""Places in the text of a response, and the tokens that bring them."""

import numpy as np
import pytest

from services.reward.places import characters, sampled_places
from tests.chat import make_bytes
from tests.families import make_unigram
from tests.models import EOS, make_tokenizer

TEXT = "\u00e4\U0001f600b \u4e2d\u6587 c"


def brute(tokenizer: object, ids: list[int]) -> list[int]:
    """Characters by decoding each beginning, of which an unfinished character at the end counts for nothing."""
    texts = [tokenizer.decode(ids[: end + 1], skip_special_tokens=True) for end in range(len(ids))]  # type: ignore[attr-defined]
    return [len(text.rstrip("\ufffd")) for text in texts]


@pytest.mark.parametrize("name", ["words", "bytes", "pieces"])
def test_each_character_is_brought_by_the_token_with_which_decoding_shows_it(name: str) -> None:
    tokenizer = {"words": make_tokenizer, "bytes": make_bytes, "pieces": make_unigram}[name]()
    text = TEXT if name == "bytes" else "w5 w12 w7"
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    actual = characters(tokenizer, np.asarray(ids, np.int32), whole)
    assert actual.tolist() == np.maximum.accumulate(brute(tokenizer, ids)).tolist()
    assert actual[-1] == len(whole)


def test_a_response_may_end_within_a_character_and_hold_bytes_of_none() -> None:
    tokenizer = make_bytes()
    ids = tokenizer(TEXT + TEXT[1], add_special_tokens=False)["input_ids"]
    cut = np.asarray(ids[:-2], np.int32)
    whole = tokenizer.decode(cut, skip_special_tokens=True)
    assert whole.endswith("\ufffd")
    actual = characters(tokenizer, cut, whole)
    assert (actual[-1], actual[-2]) == (len(whole), len(TEXT))
    draw = np.random.default_rng(0)
    for _ in range(50):
        noise = draw.integers(0, len(tokenizer), 40).astype(np.int32)
        text = tokenizer.decode(noise, skip_special_tokens=True)
        actual = characters(tokenizer, noise, text)
        assert (np.diff(actual) >= 0).all()
        assert actual[-1] == len(text)


def test_a_tokenizer_that_cleans_its_texts_up_is_decoded_step_by_step() -> None:
    tokenizer = make_tokenizer()
    ids = np.asarray(tokenizer("w5 w6 w7", add_special_tokens=False)["input_ids"], np.int32)

    # As if the blanks had been removed: what streams of tokens do not do.
    class Clean:
        backend_tokenizer = tokenizer.backend_tokenizer

        @staticmethod
        def decode(ids: object, skip_special_tokens: bool) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)).replace(" ", "")

    assert characters(Clean(), ids, "w5w6w7").tolist() == [2, 4, 6]


def test_a_part_is_earned_by_the_sampled_token_at_or_before_its_place() -> None:
    brought = np.asarray([2, 5, 5, 8, 11])
    sampled = np.asarray([True, True, False, False, True])
    places = np.asarray([1, 2, 3, 5, 6, 8, 9, 11])
    # 6 and 8 are in what was given after the second.
    assert sampled_places(places, brought, sampled).tolist() == [1, 1, 2, 2, 2, 2, 3, 3]
