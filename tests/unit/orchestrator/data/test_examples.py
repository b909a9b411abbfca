"""Examples: conversations and texts as token ids, of which the answers are trained on, and rows that are none."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.examples import Examples, examples
from orchestrator.data.splits import Row
from orchestrator.supervised.contract import Supervised
from orchestrator.supervised.registry import TRAININGS
from quartet.config.base import ConfigError
from tests.models import EOS, WORDS, make_tokenizer

USER, ASSISTANT = 60, 61
TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'w60 ' if message.role == 'user' else 'w61 ' }}{{ message.content }} <eos> w63 "
    "{% endfor %}"
    "{% if add_generation_prompt %}w61 {% endif %}"
)
HISTORY_REWRITTEN = TEMPLATE.replace(
    "{{ message.content }}", "{{ message.content if message.role == 'user' or loop.last else 'w4' }}"
)

NO_END = TEMPLATE.replace("<eos>", "w62")
BEGINS_OTHERWISE = TEMPLATE.replace("{% if add_generation_prompt %}w61 ", "{% if add_generation_prompt %}w61 w9 ")


def said_by(*texts: str, first: str = "user") -> list[dict[str, str]]:
    """Messages of which those at even places are of the role `first`, and others of the assistant."""
    return [{"role": "assistant" if place % 2 else first, "content": text} for place, text in enumerate(texts)]


@pytest.fixture
def read(policy_folder: Path, tmp_path: Path) -> Any:
    def reading(command: str, rows: Sequence[object], template: str | None = None, **data: Any) -> Examples:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        section = {"path": str(file), "chat_template": template is not None} | data
        own = {"name": "a", "model": str(policy_folder), "optimizer": {"learning_rate": 1e-3}, "max_length": 20}
        training: Supervised = TRAININGS[command].parse(own | {"data": section}, "")
        return training.read("train", tokenizer, (EOS,), len(WORDS))

    return reading


def marked(examples: Examples) -> list[list[tuple[int, bool]]]:
    """Ids and marks of each trajectory."""
    columns = examples.columns
    both = zip(columns.rows("ids"), columns.rows("sampled"), strict=True)
    return [list(zip(ids.tolist(), marks.tolist(), strict=True)) for ids, marks in both]


def given(*ids: int) -> list[tuple[int, bool]]:
    return [(token, False) for token in ids]


def trained(*ids: int) -> list[tuple[int, bool]]:
    return [(token, True) for token in ids]


def test_a_text_is_answered_by_its_answer_and_the_end(read: Any) -> None:
    examples = read("sft", [{"prompt": "w5 w6", "response": "w7"}, {"prompt": "w8", "response": "w9 w10"}])
    assert marked(examples) == [given(1, 5, 6) + trained(7, EOS), given(1, 8) + trained(9, 10, EOS)]
    assert (examples.rows, examples.left_out) == ((0, 1), 0)


def test_texts_may_hold_their_ends_themselves(read: Any) -> None:
    rows = [{"prompt": "w5", "response": "w7 <eos>"}, {"prompt": "w5", "response": "w7"}]
    assert marked(read("sft", rows, append_eos=False)) == [given(1, 5) + trained(7, EOS), given(1, 5) + trained(7)]


def test_every_reply_of_a_conversation_is_trained_on_up_to_its_end(read: Any) -> None:
    talk = [("user", "w5"), ("assistant", "w6 w7"), ("user", "w8"), ("assistant", "w9")]
    rows = [{"talk": [{"role": role, "content": content} for role, content in talk]}]
    first = given(USER, 5, EOS, 63, ASSISTANT) + trained(6, 7, EOS)
    second = given(63, USER, 8, EOS, 63, ASSISTANT) + trained(9, EOS)
    assert marked(read("sft", rows, TEMPLATE, messages_key="talk")) == [first + second]
    last = given(*(token for token, _ in first), *(token for token, mark in second if not mark)) + trained(9, EOS)
    assert marked(read("sft", rows, TEMPLATE, messages_key="talk", replies="last")) == [last]


def test_a_prompt_with_its_answer_is_a_conversation_of_two(read: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "w5"}], "response": "w6"}, {"prompt": "w5", "response": "w6"}]
    assert marked(read("sft", rows, TEMPLATE)) == [given(USER, 5, EOS, 63, ASSISTANT) + trained(6, EOS)] * 2


def test_a_comparison_is_two_trajectories_with_one_prompt(read: Any) -> None:
    rows = [{"prompt": "w5", "chosen": "w6", "rejected": "w7 w8", "by": 0.5}]
    examples = read("reward-model", rows, margin_key="by")
    assert marked(examples) == [given(1, 5) + trained(6, EOS), given(1, 5) + trained(7, 8, EOS)]
    assert examples.columns["margin"].tolist() == [0.5, 0.5]
    assert examples.take([0]).digest() == examples.columns.digest()


def test_what_is_too_long_is_left_out_with_what_it_is_compared_to(read: Any) -> None:
    long = " ".join(["w6"] * 30)
    rows = [{"prompt": "w5", "chosen": "w6", "rejected": long}, {"prompt": "w5", "chosen": "w6", "rejected": "w7"}]
    examples = read("reward-model", rows)
    assert (examples.rows, examples.left_out, len(examples.columns)) == ((1,), 1, 2)
    with pytest.raises(ConfigError, match=r"no example left of 1: all are longer than max_length \(20 tokens\)"):
        read("reward-model", rows[:1])


GOOD = {"prompt": "w5", "response": "w6", "chosen": "w6", "rejected": "w7"}


@pytest.mark.parametrize(
    ("command", "row", "said"),
    [
        ("sft", GOOD | {"response": 7}, "column 'response' should hold text, got 7"),
        ("sft", GOOD | {"response": None}, "column 'response' should hold text, got null$"),
        ("sft", GOOD | {"response": "\ud800"}, "column 'response': character 0, .* is half of a character"),
        ("sft", '{"prompt": "w5", "response"', "not valid JSON"),
        ("sft", "[1]", "should be a JSON object, got list"),
        ("reward-model", GOOD | {"rejected": "w6"}, "columns 'chosen' and 'rejected' hold the same answer"),
        ("reward-model", GOOD | {"chosen": ["w6"]}, r"column 'chosen' should hold text, got \['w6'\]; for chat"),
    ],
)
def test_a_row_that_is_no_example_is_named_by_file_line_and_column(
    command: str, row: object, said: str, read: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}/rows\.jsonl, line 3: {said}"):
        read(command, [GOOD, "", row])  # an empty line is no row, and counts as a line


def test_a_margin_may_be_a_large_whole_number(read: Any) -> None:
    examples = read("reward-model", [GOOD | {"by": 10**30}], margin_key="by")
    assert examples.columns["margin"].tolist() == pytest.approx([1e30, 1e30])


@pytest.mark.parametrize("margin", [True, "1", None, float("nan"), float("-inf"), -1e39, 10**39, 10**400])
def test_a_margin_is_a_number(margin: object, read: Any) -> None:
    with pytest.raises(ConfigError, match=r"line 1: column 'by' should hold a finite number"):
        read("reward-model", [GOOD | {"by": margin}], margin_key="by")


def test_a_missing_column_is_named_with_those_that_there_are(read: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.response_key: no column 'answer' in .* columns are prompt, response"
    ):
        read("sft", [GOOD], response_key="answer")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "w5"}], "should hold messages with one of the assistant"),
        ([{"role": "assistant", "content": "w5"}], "should hold messages with one of the assistant"),
        ([{"content": "w5"}], "should hold text or a list of messages, each with a role and content"),
    ],
)
def test_a_conversation_has_a_reply_to_train_on(messages: object, said: str, read: Any) -> None:
    with pytest.raises(ConfigError, match=f"line 1: column 'talk' {said}"):
        read("sft", [{"talk": messages}], TEMPLATE, messages_key="talk")


def test_a_template_that_rewrites_the_past_trains_the_last_reply_alone(read: Any) -> None:
    talk = [("user", "w5"), ("assistant", "w6"), ("user", "w8"), ("assistant", "w9")]
    rows = [{"talk": [{"role": role, "content": content} for role, content in talk]}]
    with pytest.raises(ConfigError, match=r"line 1: the chat template writes earlier messages differently"):
        read("sft", rows, HISTORY_REWRITTEN, messages_key="talk")
    [own] = marked(read("sft", rows, HISTORY_REWRITTEN, messages_key="talk", replies="last"))
    assert own[-2:] == trained(9, EOS)
    assert not any(mark for _, mark in own[:-2])


def test_a_template_is_asked_for(read: Any) -> None:
    with pytest.raises(ConfigError, match=r"chat_template: the tokenizer has none"):
        read("sft", [GOOD], chat_template=True)
    with pytest.raises(ConfigError, match=r"data: messages_key: conversations are written by a chat template"):
        read("sft", [GOOD], messages_key="talk")


def test_an_answer_may_repeat_its_prompt(read: Any) -> None:
    rows = [{"prompt": "w5", "response": said_by("w5", "w6")}]
    own = given(USER, 5, EOS, 63, ASSISTANT) + trained(6, EOS)
    assert marked(read("sft", rows, TEMPLATE)) == [own]
    rows = [{"prompt": said_by("w5"), "chosen": said_by("w5", "w6"), "rejected": said_by("w5", "w7")}]
    assert marked(read("reward-model", rows, TEMPLATE))[0] == own


@pytest.mark.parametrize("first", ["user", "system"])
def test_an_answer_begins_with_no_other_prompt(first: str, read: Any) -> None:
    rows = [{"prompt": "w5", "chosen": said_by("w8", "w6", first=first), "rejected": "w7"}]
    with pytest.raises(
        ConfigError,
        match=rf"line 1: column 'chosen' begins with a message of the {first} that column 'prompt' does not .*; it "
        "should hold the answer alone, or the very messages of the prompt",
    ):
        read("reward-model", rows, TEMPLATE)


def test_a_repeated_prompt_is_no_answer(read: Any) -> None:
    with pytest.raises(ConfigError, match=r"line 1: column 'response' should end with a message of the assistant"):
        read("sft", [{"prompt": "w5", "response": said_by("w5")}], TEMPLATE)


def test_answers_are_compared_as_a_whole(read: Any) -> None:
    def steps(text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in (("assistant", text), ("tool", "w9"))]

    reply = [{"role": "assistant", "content": "w6"}]
    row: dict[str, object] = {"prompt": "w5", "chosen": steps("w7") + reply, "rejected": steps("w8") + reply}
    assert len(read("reward-model", [row], TEMPLATE)) == 1
    with pytest.raises(ConfigError, match=r"line 1: columns 'chosen' and 'rejected' hold the same answer"):
        read("reward-model", [row | {"rejected": row["chosen"]}], TEMPLATE)


@pytest.mark.parametrize("command", ["sft", "reward-model"])
def test_a_template_ends_replies_with_an_end_token(command: str, read: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rows\.jsonl, line 1: the chat template ends a reply with '.*w6 w62 w63 ', which holds no end token "
        r"of the model.* eos_token_id in .*generation_config\.json",
    ):
        read(command, [GOOD], NO_END)


@pytest.mark.parametrize("command", ["sft", "reward-model"])
def test_a_template_begins_replies_as_it_asks_for_them(command: str, read: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: the chat template does not begin a reply .*add_generation_prompt"
    ):
        read(command, [GOOD], BEGINS_OTHERWISE)


@pytest.mark.parametrize("key", ["prompt", "response"])
def test_half_of_a_character_in_a_message_has_a_place(key: str, read: Any) -> None:
    row = {"prompt": said_by("w5"), "response": [{"role": "assistant", "content": "w6"}]}
    row[key][0]["content"] = "w5 \ud800"
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: character \d+, \\ud800, is half of a character"):
        read("sft", [GOOD, row], TEMPLATE)


@pytest.mark.parametrize(
    ("template", "data", "said"),
    [
        (None, {"replies": "last"}, "data: replies: for whole conversations"),
        (TEMPLATE, {"messages_key": "talk", "input_key": "prompt"}, "data: input_key: whole conversations have no"),
        (TEMPLATE, {"messages_key": "talk", "response_key": "a"}, "data: response_key: whole conversations have no"),
        (TEMPLATE, {"append_eos": False}, "data: append_eos: a chat template writes its own end"),
    ],
)
def test_a_key_without_effect_is_refused(template: str | None, data: dict[str, Any], said: str, read: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        read("sft", [GOOD], template, **data)


@pytest.mark.parametrize("ids", [(5, 9), (9, 5)])
def test_an_id_that_the_model_does_not_have_is_named_in_a_prompt_and_in_an_answer(ids: tuple[int, int]) -> None:
    prompt, answer = (np.asarray([each], np.int32) for each in ids)
    given: dict[str, Any] = {"rows": [Row(0, "line 1", {})], "parts": [[(False, prompt), (True, answer)]]}
    with pytest.raises(ConfigError, match=r"^line 1: the tokenizer gives id 9, outside .* \(0 to 8\)"):
        examples("train", **given, max_length=None, vocabulary=9)
    assert examples("train", **given, max_length=2, vocabulary=10).rows == (0,)
    with pytest.raises(ConfigError, match="no example left of 1: all are longer"):
        examples("train", **given, max_length=1, vocabulary=10)
