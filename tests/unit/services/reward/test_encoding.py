"""Requests of the reward service as what scorers take."""

import json
import re
import time
from typing import Any

import numpy as np
import pytest

from protos import reward_pb2 as pb
from quartet.columns import Columns
from quartet.serving.share import UNKNOWN, Share
from quartet.wire.callers import Purpose
from quartet.wire.codec import pack_longs, unpack_floats, unpack_longs
from quartet.wire.errors import InvalidArgument
from quartet.wire.pairs import Pair
from services.reward.encoding import Encoder, Received, size_of
from services.reward.scorers.scorer import EncodedPair, InParts
from tests.models import BOS, EOS, PAD, UNK, make_tokenizer
from tests.trajectories import of

ENCODER = Encoder(make_tokenizer(), vocab_size=64, max_length=6)


def ids(*rows: list[int]) -> list[Any]:
    return [np.asarray(row, np.int32) for row in rows]


def by_ids(prompts: list[Any], responses: list[Any], **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(tokens=of(prompts, responses).pack(), **fields)


def by_text(prompts: list[str], responses: list[str], **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(texts=pb.TextPairs(prompts=prompts, responses=responses), **fields)


def decode(encoder: Encoder, request: pb.ScoreRequest, share: Share = UNKNOWN) -> list[EncodedPair]:
    call = encoder.call(Received(request), share)
    return call.items(range(len(call.costs)))


def plain(scored: list[EncodedPair]) -> list[Any]:
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


def earned(request: pb.ScoreRequest, rows: dict[int, InParts]) -> list[tuple[int, int, float]]:
    """The parts in the answer to a request whose pairs have these results."""
    call = ENCODER.call(Received(request), UNKNOWN)
    assert not call.in_parts
    call.put([*rows], [*rows.values()])
    assert call.in_parts
    reply = call.response(pb.ScorerIdentity(process=True))
    pairs, places = unpack_longs(reply.part_pairs, ""), unpack_longs(reply.part_places, "")
    return list(zip(pairs.tolist(), places.tolist(), unpack_floats(reply.part_rewards, "").tolist(), strict=True))


def in_parts(score: float, *parts: tuple[int, float]) -> InParts:
    places, rewards = zip(*parts, strict=True)
    return InParts(np.asarray([score], np.float32), np.asarray(places), np.asarray(rewards, np.float32))


def test_parts_of_a_score_are_at_sampled_tokens_of_ids_and_at_characters_of_texts() -> None:
    parts = {1: in_parts(3.0, (2, 1.0), (3, -0.5)), 0: in_parts(1.0, (5, 0.25))}
    # w8 w9 | w10 w4
    asked = by_ids(ids([BOS], [BOS, 7]), ids([8, 9, EOS], [10, 4, EOS]))
    assert earned(asked, parts) == [(0, 2, 0.25), (1, 1, 1.0), (1, 1, -0.5)]
    texts = by_text(["w5", "w7"], ["w8 w9", "w10 w4"])
    assert earned(texts, parts) == [(0, 5, 0.25), (1, 2, 1.0), (1, 3, -0.5)]


def test_parts_in_an_environments_answer_are_earned_by_the_response_before_it() -> None:
    marks = np.asarray([False, True, True, False, False, True])
    columns = Columns(np.asarray([BOS, 8, 9, 5, 6, 7], np.int32), np.asarray([6], np.int32), marks, {})
    # w8 w9 w5 w6 w7, of which w5 and w6 were given.
    asked = pb.ScoreRequest(tokens=columns.pack())
    found = earned(asked, {0: in_parts(0.0, (2, 1.0), (8, 2.0), (11, 3.0), (14, 4.0))})
    assert found == [(0, 1, 1.0), (0, 2, 2.0), (0, 2, 3.0), (0, 3, 4.0)]
    marks = np.asarray([False, True, True, False, True])
    columns = Columns(np.asarray([BOS, 8, EOS, 5, 7], np.int32), np.asarray([5], np.int32), marks, {})
    # w8 w5 w7, without the end of the first response, which earns what the environment's w5 does.
    found = earned(pb.ScoreRequest(tokens=columns.pack()), {0: in_parts(0.0, (2, 1.0), (5, 2.0), (8, 3.0))})
    assert found == [(0, 1, 1.0), (0, 2, 2.0), (0, 3, 3.0)]


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


def test_a_text_that_was_cut_off_has_no_end() -> None:
    asked = by_text(["w5", "w5"], ["w8", "w8 <eos>"], ended=[False, True])
    cut, whole = decode(ENCODER, asked)
    assert [each.response_ids.tolist() for each in (cut, whole)] == [[8], [8, EOS]]
    assert [each.pair.ended for each in (cut, whole)] == [False, True]


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
    for prompts, responses, problem in (
        (["w5", ""], ["w6", "w6"], "1 tokens and no prompt; needs two"),
        (["w5"] * 2, ["w6", ""], "the response has no tokens"),
        (["w5", ""], ["w6", ""], "the prompt has no tokens"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(f"texts[1]: {problem}")):
            decode(encoder, by_text(prompts, responses))


@pytest.mark.parametrize("padding", [PAD, EOS])
def test_texts_with_special_tokens_are_the_ids_that_they_were_decoded_from(padding: int) -> None:
    """Other systems send what `batch_decode` gives with skip_special_tokens=False."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token_id = padding
    encoder = Encoder(tokenizer, 64, 6)
    prompts, responses = ids([BOS, 5, 6], [BOS, 7]), ids([8, EOS], [9, 10, EOS])
    expected = decode(encoder, by_ids(prompts, responses))
    for before, after in (([], []), ([padding] * 2, [padding]), ([], [padding] * 3)):
        asked = tokenizer.batch_decode([[*before, *prompt] for prompt in prompts])
        answered = tokenizer.batch_decode([[*response, *after] for response in responses])
        whole = [f"{prompt} {response}" for prompt, response in zip(asked, answered, strict=True)]
        of_pairs, of_wholes = decode(encoder, by_text(asked, answered)), decode(encoder, by_text(["", ""], whole))
        for right, pair, one in zip(expected, of_pairs, of_wholes, strict=True):
            assert plain([pair])[0][:2] == plain([right])[0][:2]
            assert (pair.pair.prompt.split(), pair.pair.response.split()) == (
                right.pair.prompt.split(),
                right.pair.response.split(),
            )
            assert [*one.prompt_ids, *one.response_ids] == [*right.prompt_ids, *right.response_ids]
            assert one.pair.response.split() == [*right.pair.prompt.split(), *right.pair.response.split()]


def test_a_text_of_nothing_but_padding_is_read_once() -> None:
    began = time.thread_time()
    (scored,) = decode(ENCODER, by_text(["<pad>" * 400_000], ["<pad>" * 400_000]))
    assert (scored.pair.prompt, scored.pair.response) == ("", "")
    assert scored.response_ids.tolist() == [EOS]
    assert time.thread_time() - began < 20


def test_special_tokens_within_texts_stay() -> None:
    (scored,) = decode(ENCODER, by_text(["w5 <eos>"], ["<eos> w7"]))
    assert plain([scored])[0][:2] == ([BOS, 5, EOS], [EOS, 7, EOS])
    assert (scored.pair.prompt, scored.pair.response) == ("w5 <eos>", "<eos> w7")


def test_a_whole_text_is_scored_as_it_stands() -> None:
    whole, ended, pair = decode(ENCODER, by_text(["", "", "w5"], ["w6 w7", "w6 <eos>", "w6 <eos>"]))
    assert [each.tolist() for each in (whole.prompt_ids, whole.response_ids)] == [[BOS], [6, 7]]
    assert [each.tolist() for each in (ended.prompt_ids, ended.response_ids)] == [[BOS], [6, EOS]]
    assert [each.tolist() for each in (pair.prompt_ids, pair.response_ids)] == [[BOS, 5], [6, EOS]]
    assert (whole.pair.response, pair.pair.response.strip()) == ("w6 w7", "w6")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.ScoreRequest(), "pairs: set tokens, texts or conversations"),
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
        (by_text(["w5"], ["w6"], columns=["{}"] * 2), "columns: 2 for 1 pairs; send one each, or none"),
        (by_text(["w5"], ["w6"], columns=["[]"]), "columns[0]: should be a JSON object"),
        (by_text(["w5"], ["w6"], columns=["{"]), "columns[0]: is not JSON"),
        (by_text(["w5"], ["w6"], columns=["[" * 100_000]), "columns[0]: is not JSON"),
        (by_text(["w5"], ["w6"], columns=[r'{"a": "\ud800"}']), "columns[0]: is not JSON"),
        (by_text(["w5"], ["w6"], groups=b"1234"), "groups: 4 bytes are not a whole number"),
        (by_text(["w5"], ["w6"], groups=pack_longs([1, 2])), "groups: 2 for 1 pairs; send one each, or none"),
        (by_text(["w5"], ["w6"], pair_timeout_s=-1), "pair_timeout_s: -1.0; must be finite and not negative"),
        (by_text(["w5"], ["w6"], pair_timeout_s=0.049), "pair_timeout_s: 0.049; must be 0.05 or more, or 0 for what"),
        (by_text(["w5"], ["w6"], pair_timeout_s=1e-6), "pair_timeout_s: 1e-06; must be 0.05 or more"),
        (by_text(["w5"], ["w6"], pair_timeout_s=float("nan")), "pair_timeout_s: nan; must be finite and not"),
    ],
)
def test_malformed_requests(request_: pb.ScoreRequest, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        decode(ENCODER, request_)


def test_all_that_is_known_of_a_pair_reaches_its_scorer() -> None:
    known = {
        "labels": ["a", "b"],
        "columns": ['{"task": "sums", "tests": [1, null]}', '{"\u00e9": "\U0001f600"}'],
        "groups": pack_longs([7, -1]),
        "pair_timeout_s": 0.5,
    }
    for request in (by_text(["w5", "w6"], ["w7", "w8"], **known), by_ids(ids([5], [6]), ids([7, EOS], [8]), **known)):
        one, two = (scored.pair for scored in decode(ENCODER, request))
        assert (one.label, one.columns) == ("a", {"task": "sums", "tests": [1, None]})
        assert (two.label, two.columns) == ("b", {"\u00e9": "\U0001f600"})
        assert one.timeout_s == two.timeout_s == 0.5
    (nothing,) = decode(ENCODER, by_text(["w5"], ["w6"]))
    assert (nothing.pair.columns, nothing.pair.group, nothing.pair.timeout_s, nothing.pair.messages) == (
        *({}, None),
        *(None, ()),
    )


def test_a_group_has_one_number_in_all_calls_of_its_caller_and_in_no_other_callers() -> None:
    def groups(share: Share, *numbers: int) -> list[int | None]:
        rows = len(numbers)
        request = by_text(["w5"] * rows, ["w6"] * rows, groups=pack_longs(numbers))
        return [scored.pair.group for scored in decode(ENCODER, request, share)]

    shares = [
        Share(name, purpose, run)
        for name in ("alice", "bob")
        for purpose in (Purpose.TRAINING, Purpose.EVALUATION)
        for run in ("first", "second")
    ]
    most = 2**63 - 1
    seen = [groups(share, 0, 0, -1, most) for share in shares]
    assert all(first == second for first, second, _, _ in seen)
    assert len({number for each in seen for number in each}) == 3 * len(shares)
    assert [groups(share, most, 0) for share in shares] == [[each[3], each[0]] for each in seen]


def test_a_text_counts_by_its_bytes() -> None:
    texts = {"w" * 9: 9, "é" + "w" * 8: 10, "日本": 6, "\U0001f600": 4, "": 0}
    assert {text: size_of(text) for text in texts} == texts
    request = by_text([*texts], [*texts])
    assert Received(request).tokens() == 2 * sum(texts.values())
    assert ENCODER.call(Received(request), UNKNOWN).costs.tolist() == [2 * size + 2 for size in texts.values()]


TALK = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w5 w6"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "w7 w8"}]
PLAIN = "{% for m in messages %}{{ m['content'] + ' <eos> ' }}{% endfor %}"
ASKS = PLAIN + "{% if add_generation_prompt %}w20 w21 {% endif %}"
REFUSES = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('first comes the user') }}{% endif %}" + PLAIN


def conversations(*of: Any, **fields: Any) -> pb.ScoreRequest:
    messages = [each if isinstance(each, str) else json.dumps(each) for each in of]
    return pb.ScoreRequest(conversations=pb.Conversations(messages=messages), **fields)


def with_template(template: str | None, **settings: Any) -> Encoder:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer, 64, settings.pop("max_length", 32), **settings)


@pytest.mark.parametrize("template", [PLAIN, ASKS])
def test_a_conversation_is_scored_as_the_template_renders_it(template: str) -> None:
    """The template may ask for the answer by words that it leaves out once the answer is there."""
    (scored,) = decode(with_template(template), conversations(ANSWERED, labels=["a"]))
    assert scored.prompt_ids.tolist() == [9, EOS, 5, 6, EOS]
    assert scored.response_ids.tolist() == [7, 8, EOS]
    assert scored.pair == Pair("w9 w5 w6", "w7 w8", label="a", messages=tuple(ANSWERED))


def test_a_function_gets_messages_without_a_template_too() -> None:
    parts = [{"type": "text", "text": "w5"}, {"type": "image"}]
    asked = [{"role": "user", "content": parts}, {"role": "tool", "content": None}, ANSWERED[-1]]
    request = conversations(ANSWERED, asked)
    one, two = decode(with_template(None, ids=False), request)
    assert (one.pair.prompt, one.pair.response, one.pair.messages) == ("w9\nw5 w6", "w7 w8", tuple(ANSWERED))
    assert (two.pair.prompt, two.pair.messages) == ("w5\n", tuple(asked))
    bare = Encoder(None, 0, 32, ids=False)
    assert [scored.pair for scored in decode(bare, request)] == [one.pair, two.pair]
    with pytest.raises(InvalidArgument, match=r"^conversations: the scorer's tokenizer has no chat template; send"):
        decode(with_template(None), request)


def test_a_scorer_without_a_tokenizer_takes_texts_and_no_ids() -> None:
    encoder = Encoder(None, 0, 4, ids=False)
    (scored,) = decode(encoder, by_text(["as many words as there are"], [""], labels=["a"]))
    assert scored.pair == Pair("as many words as there are", "", label="a")
    with pytest.raises(InvalidArgument, match=r"^tokens: the scorer has no tokenizer; send texts or conversations$"):
        decode(encoder, by_ids(ids([5]), ids([6])))


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ("nothing", "conversations[0]: is not JSON"),
        ("{}", "conversations[0]: should be a JSON list of two messages or more"),
        ([ANSWERED[-1]], "conversations[0]: should be a JSON list of two messages or more"),
        (["w5", ANSWERED[-1]], "conversations[0][0]: should be an object with `role` and `content`"),
        ([{"role": 1}, ANSWERED[-1]], "conversations[0][0]: should be an object with `role` and `content`"),
        (TALK, "conversations[0][1]: should be of role assistant, with text as its content"),
        ([*TALK, {"role": "assistant"}], "conversations[0][2]: should be of role assistant, with text as its"),
        (r'[{"role": "user", "content": "\ud800"}, {}]', "conversations[0]: is not JSON"),
        (
            ANSWERED,
            "conversations[0]: the chat template of the scorer's tokenizer does not take it: TemplateError: fi",
        ),
        (
            [TALK[1], {"role": "assistant", "content": "w5 " * 40}],
            "conversations[0]: 3 prompt + 41 response tokens exc",
        ),
    ],
)
def test_conversations_that_no_scorer_takes(conversation: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        decode(with_template(REFUSES), conversations(conversation))


def test_pairs_up_to_the_limit_are_fine() -> None:
    assert len(decode(ENCODER, by_text(["w5"], ["w6 w6 w6"]))) == 1
