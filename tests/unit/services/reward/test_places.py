"""Places in the text of a response, and the tokens that bring them."""

from typing import Any

import numpy as np
import pytest

from services.reward.places import bringing
from tests.chat import make_bytes
from tests.families import make_unigram
from tests.models import EOS, make_tokenizer

TEXT = "\u00e4\U0001f600b \u4e2d\u6587 c"


def brute(tokenizer: Any, ids: list[int], whole: str) -> list[int]:
    """The token of each character, by decoding each beginning."""
    texts = [tokenizer.decode(ids[: end + 1], skip_special_tokens=True) for end in range(len(ids))]
    return [
        next(token for token, text in enumerate(texts) if text.startswith(whole[:place]))
        for place in range(1, len(whole) + 1)
    ]


def actual(tokenizer: Any, ids: list[int], whole: str) -> list[int]:
    return [*map(int, bringing(tokenizer, np.asarray(ids, np.int32), whole, np.arange(1, len(whole) + 1)))]


class Other:
    """A tokenizer whose tokens cannot be streamed, and that writes its texts in its own way."""

    def __init__(self, tokenizer: Any, without: str = "") -> None:
        self._tokenizer, self._without = tokenizer, without

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)).replace(self._without, "")


@pytest.mark.parametrize("name", ["words", "bytes", "pieces"])
def test_each_character_is_brought_by_the_token_with_which_decoding_shows_it(name: str) -> None:
    tokenizer = {"words": make_tokenizer, "bytes": make_bytes, "pieces": make_unigram}[name]()
    text = TEXT if name == "bytes" else "w5 w12 w7"
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = tokenizer.convert_tokens_to_ids("<|im_end|>") if name == "bytes" else EOS
    for ids in ([*plain, special], [*plain[:3], special, *plain[3:]]):
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert actual(tokenizer, ids, whole) == brute(tokenizer, ids, whole)
        assert actual(Other(tokenizer), ids, whole) == brute(tokenizer, ids, whole)


def test_a_response_may_end_within_a_character_and_hold_bytes_of_none() -> None:
    tokenizer = make_bytes()
    cut = tokenizer(TEXT + TEXT[1], add_special_tokens=False)["input_ids"][:-2]
    whole = tokenizer.decode(cut, skip_special_tokens=True)
    assert whole.endswith("\ufffd")
    assert actual(tokenizer, cut, whole)[-2:] == [len(cut) - 3, len(cut) - 1]
    draw = np.random.default_rng(0)
    for _ in range(50):
        noise = draw.integers(0, len(tokenizer), 40).tolist()
        text = tokenizer.decode(noise, skip_special_tokens=True)
        for each in (tokenizer, Other(tokenizer)):
            found = np.asarray(actual(each, noise, text))
            assert (np.diff(found) >= 0).all()
            assert 0 <= found[0] <= found[-1] < len(noise)


def test_texts_that_streams_of_tokens_do_not_give_are_decoded() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("w5 w6 w7", add_special_tokens=False)["input_ids"]
    assert actual(Other(tokenizer, without=" "), ids, "w5w6w7") == [0, 0, 1, 1, 2, 2]
    marked = make_bytes()
    ids = marked("\u00e4 \u4e2db", add_special_tokens=False)["input_ids"]
    # The first byte of a character is no character yet.
    assert actual(Other(marked, without=" "), ids, "\u00e4\u4e2db") == [1, 5, 6]
