"""Requests of the reward service as what scorers take."""

import re
from typing import Any

import numpy as np
import pytest

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.wire.errors import InvalidArgument
from quartet.wire.pairs import Pair
from services.reward.encoding import Encoder, Received
from services.reward.scorers.scorer import Scored
from tests.models import BOS, EOS, PAD, UNK, make_tokenizer
from tests.trajectories import of

ENCODER = Encoder(make_tokenizer(), vocab_size=64, max_length=6)


def ids(*rows: list[int]) -> list[Any]:
    return [np.asarray(row, np.int32) for row in rows]


def by_ids(prompts: list[Any], responses: list[Any], **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(tokens=of(prompts, responses).pack(), **fields)


def by_text(prompts: list[str], responses: list[str], **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(texts=pb.TextPairs(prompts=prompts, responses=responses), **fields)


def decode(encoder: Encoder, request: pb.ScoreRequest) -> list[Scored]:
    call = encoder.call(Received(request))
    return call.items(range(len(call.costs)))


def plain(scored: list[Scored]) -> list[Any]:
    return [(s.prompt_ids.tolist(), s.response_ids.tolist(), s.pair) for s in scored]


def test_ids_and_their_text_are_the_same_pairs() -> None:
    first = by_ids(ids([BOS, 5, 6], [BOS, 7]), ids([8, EOS], [9, 10, EOS]), labels=["a", "b"])
    second = by_text(["w5 w6", "w7"], ["w8", "w9 w10"], labels=["a", "b"])
    expected = [
        ([BOS, 5, 6], [8, EOS], Pair(prompt="w5 w6", response="w8", label="a", ended=True)),
        ([BOS, 7], [9, 10, EOS], Pair(prompt="w7", response="w9 w10", label="b", ended=True)),
    ]
    assert plain(decode(ENCODER, first)) == expected
    assert plain(decode(ENCODER, second)) == expected


def test_a_response_without_an_end_was_cut_off() -> None:
    (scored,) = decode(ENCODER, by_ids(ids([BOS, 5]), ids([8, EOS, 9])))
    assert scored.pair == Pair(prompt="w5", response="w8 w9", label="", ended=False)
    (scored,) = decode(ENCODER, by_ids(ids([BOS, 5]), ids([8, PAD, EOS])))
    assert scored.pair == Pair(prompt="w5", response="w8", label="", ended=True)


def test_a_response_ended_as_its_sampler_says() -> None:
    """Several tokens may end a text, and a tokenizer knows one."""
    pairs = ids([BOS, 5], [BOS, 6]), ids([8, 9], [8, EOS])
    assert [s.pair.ended for s in decode(ENCODER, by_ids(*pairs, ended=[True, False]))] == [True, False]
    with pytest.raises(InvalidArgument, match=r"^ended: 1 for 2 pairs; send one each, or none$"):
        decode(ENCODER, by_ids(*pairs, ended=[True]))


def test_a_conversation_is_one_text_and_its_parts() -> None:
    """The answer of an environment is part of the text, and may be told from the responses."""
    marks = np.asarray([False, False, True, True, False, True, False, True, True])
    columns = Columns.of(
        np.asarray([BOS, 5, 8, EOS, 20, 9, BOS, 8, EOS], np.int32), np.asarray([6, 3], np.int32), marks
    )
    two, one = decode(ENCODER, pb.ScoreRequest(tokens=columns.pack(), ended=[True, False]))
    assert two.response_ids.tolist() == [8, EOS, 20, 9]
    assert two.pair == Pair("w5", "w8 w20 w9", ended=True, texts=("w8", "w20", "w9"))
    assert one.pair == Pair("", "w8", ended=False)
    assert (two.pair.last, one.pair.last) == ("w9", "w8")


def test_ids_beyond_the_tokenizer_are_taken_where_the_model_has_them() -> None:
    encoder = Encoder(make_tokenizer(), vocab_size=96, max_length=6)
    (scored,) = decode(encoder, by_ids(ids([BOS, 5]), ids([8, 80, EOS])))
    assert scored.pair.response == "w8"
    with pytest.raises(InvalidArgument, match="is outside the vocabulary"):
        decode(encoder, by_ids(ids([BOS, 5]), ids([8, 96, EOS])))


def test_texts_may_be_empty_and_unknown_words_have_an_id() -> None:
    (scored,) = decode(ENCODER, by_text([""], [""]))
    assert plain([scored]) == [([BOS], [EOS], Pair(prompt="", response=""))]
    (scored,) = decode(ENCODER, by_text(["zebra"], ["w5"]))
    assert (scored.prompt_ids.tolist(), scored.pair.prompt) == ([BOS, UNK], "zebra")


def test_a_tokenizer_that_ends_and_begins_nothing() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.backend_tokenizer.post_processor = None
    encoder = Encoder(tokenizer, 64, 6)
    assert plain(decode(encoder, by_text(["w5"], ["w6"])))[0][:2] == ([5], [6])
    (scored,) = decode(encoder, by_ids(ids([5]), ids([EOS])))
    assert not scored.pair.ended
    for prompts, responses, field in ((["w5", ""], ["w6", "w6"], "prompts"), (["w5"] * 2, ["w6", ""], "responses")):
        with pytest.raises(InvalidArgument, match=re.escape(f"texts.{field}[1]: has no tokens")):
            decode(encoder, by_text(prompts, responses))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.ScoreRequest(), "pairs: set tokens or texts"),
        (by_ids([], []), "tokens: empty; send at least one trajectory"),
        (by_text([], []), "texts: empty; send at least one prompt and response"),
        (by_text(["w5"], ["w6", "w7"]), "texts: 1 prompts but 2 responses; send one for one"),
        (by_ids(ids([5]), ids([64])), "tokens.ids[1]: 64 is outside the vocabulary (0 to 63)"),
        (
            by_ids(ids([5], [5] * 3), ids([6], [6] * 4)),
            "tokens.lengths[1]: 7 tokens exceed the model's max_length of 6",
        ),
        (
            # <bos> and <eos> count.
            by_text(["w5 w5"], ["w6 w6 w6"]),
            "texts[0]: 3 prompt + 4 response tokens exceed the model's max_length of 6",
        ),
        (by_ids(ids([5]), ids([6]), labels=["a", "b"]), "labels: 2 for 1 pairs; send one each, or none"),
        (by_text(["w5"] * 2, ["w6"] * 2, labels=["a"]), "labels: 1 for 2 pairs; send one each, or none"),
    ],
)
def test_malformed_requests(request_: pb.ScoreRequest, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        decode(ENCODER, request_)


def test_pairs_up_to_the_limit_are_fine() -> None:
    assert len(decode(ENCODER, by_text(["w5"], ["w6 w6 w6"]))) == 1
