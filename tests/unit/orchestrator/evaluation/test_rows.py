"""Rows of JSONL: what is read of them, and what is said of those that are wrong."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.evaluation.rows import LONGEST, RowFile, dumped, parse, rows
from quartet.config.base import ConfigError
from tests.unit.scoring import write

TALK = [{"role": "user", "content": "hi"}]


def row(**values: Any) -> Any:
    return parse(dumped(values), 1, "a.jsonl")


def test_prompts_are_texts_or_messages() -> None:
    text = row(prompt="p", response="r", label="l", source="s")
    assert (text.prompt, text.messages, text.response, text.label) == ("p", (), "r", "l")
    assert text.columns == {"label": "l", "source": "s"}
    for field in ("prompt", "messages"):
        chat = row(**{field: TALK}, response="r")
        assert (chat.prompt, chat.messages, chat.response) == ("", (*TALK,), "r")
        assert chat.conversation("r") == [*TALK, {"role": "assistant", "content": "r"}]
    whole = row(messages=[*TALK, {"role": "assistant", "content": "r"}])
    assert (whole.messages, whole.response) == ((*TALK,), "r")
    assert row(prompt="p").response is None
    assert row(prompt="p", response=None).response is None
    assert row(prompt="", response="").response == ""


def test_a_line_is_utf_8_whatever_it_holds() -> None:
    for value in ("é", "\U0001f600", "\ud800", "\n"):
        line = dumped({"prompt": "p", "other": value})
        assert line.decode().count("\n") == 1
        assert parse(line, 1, "a.jsonl").values["other"] == value


def test_labels_that_are_no_texts_are_written_as_json() -> None:
    assert [row(prompt="p", label=label).label for label in (None, 7, [1, "a"])] == ["", "7", '[1, "a"]']


def test_rows_of_one_prompt_and_label_have_one_key() -> None:
    one = row(prompt="p", label="l", response="r")
    assert one.key == row(prompt="p", label="l", response="other", source="s").key
    others = [row(prompt="p"), row(prompt="q", label="l"), row(messages=TALK), row(prompt=TALK, label="l")]
    assert len({one.key, *(other.key for other in others)}) == 5
    assert row(messages=TALK).key == row(prompt=TALK).key
    assert row(messages=TALK).key == row(messages=[*TALK, {"role": "assistant", "content": "r"}]).key


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not valid JSON: "),
        (b"\xff{}", "not valid JSON: "),
        (b'{"prompt": NaN}', "not valid JSON: NaN is not a JSON number"),
        (b'{"prompt": "p", "n": 1e999}', "not valid JSON: 1e999 is larger than any number of 64 bits"),
        (b"[" * 100_000, "not valid JSON: "),
        (b"[1]", "should be a JSON object, got [1]"),
        (b"{}", "prompt: required"),
        (b'{"prompt": 1}', "prompt: should be a list of messages, got 1"),
        (b'{"prompt": []}', "prompt: should be a list of messages, got []"),
        (b'{"messages": "text"}', "messages: should be a list of messages, got 'text'"),
        (b'{"prompt": "p", "messages": []}', "prompt, messages: give one of them"),
        (b'{"messages": [1]}', "messages[0]: should be a mapping, got 1"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content: required"),
        (b'{"prompt": [{"role": 1, "content": ""}]}', "prompt[0].role: should be text, got 1"),
        (rb'{"prompt": "\ud800"}', "prompt: holds half of a surrogate pair"),
        (rb'{"prompt": "p", "response": "a \udfff"}', "response: holds half of a surrogate pair"),
        (rb'{"prompt": "p", "label": "\ud800"}', "label: holds half of a surrogate pair"),
        (rb'{"prompt": "p", "label": ["\ud800"]}', "label: holds half of a surrogate pair"),
        (b'{"prompt": "p", "response": 1}', "response: should be text, got 1"),
        (b'{"messages": [{"role": "assistant", "content": "r"}]}', "messages: the last should be a response"),
    ],
)
def test_a_wrong_row_is_named_by_line_and_field(line: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^a.jsonl, line 3: {re.escape(said)}"):
        list(rows(io.BytesIO(b'{"prompt": "p"}\n\n' + line + b"\n"), "a.jsonl"))


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 < size <= LONGEST + 1
            return b"x" * size

    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: more than 64 MiB"):
        next(rows(Endless(), "a.jsonl"))  # type: ignore[arg-type]


def test_a_file_is_checked_whole_and_read_again_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p\xc3\xa9"}\n\n{"prompt": "q"}')
    with RowFile(path) as file:
        assert len(file) == 2
        assert [(file[index].line, file[index].prompt) for index in (1, 0)] == [(3, "q"), (1, "pé")]
        first = file.hash
    write(path, {"prompt": "p"})
    with RowFile(path) as file:
        assert file.hash != first
    path.write_bytes(b'{"prompt": "p"}\n{"prompt": 1}\n')
    with pytest.raises(ConfigError, match="line 2: prompt: "):
        RowFile(path)
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="holds no rows"):
        RowFile(path)
