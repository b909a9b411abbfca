"""Rows of a JSONL file: a prompt and a response, or a prompt alone, and whatever else stands beside them."""

import fcntl
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from orchestrator.monitoring.jsonl import parse_object
from quartet.config.base import MIB, ConfigError
from quartet.config.explain import excerpt
from quartet.wire.pairs import label_of

LONGEST = 64 * MIB
"""Most bytes of a line."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A line that has been checked."""

    line: int
    """Number of the line, from 1."""
    values: Mapping[str, Any]
    """The object, as it was read."""
    prompt: str
    """The prompt as text; empty for messages."""
    messages: tuple[Message, ...]
    """The prompt as chat messages; empty for text."""
    response: str | None
    """The response; None if the row has none."""

    @property
    def label(self) -> str:
        """The column `label` as text; empty if there is none."""
        return label_of(self.values.get("label"))

    @property
    def columns(self) -> dict[str, Any]:
        """All that is neither prompt nor response."""
        return {name: value for name, value in self.values.items() if name not in ("prompt", "messages", "response")}

    @property
    def key(self) -> bytes:
        """Identity of the prompt with its label, by which responses to one prompt are found, in other files too."""
        whole = [self.prompt, [*self.messages], self.label]
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).digest()[:16]

    def conversation(self, response: str) -> list[Message]:
        """The messages with a response at the end."""
        return [*self.messages, {"role": "assistant", "content": response}]


def parse(line: bytes, number: int, name: str) -> Row:
    """A line's row.

    A prompt is the column `prompt`, a text or a list of messages, or the column `messages`. A response is the column
    `response`; without it, the last of `messages` if its role is assistant.

    Raises:
        ConfigError: the line is not such a row; the message names the file, the line and the field.
    """
    where = f"{name}, line {number}"
    values = parse_object(line, where)
    if "prompt" in values and "messages" in values:
        raise ConfigError(f"{where}: prompt, messages: give one of them")
    response = values.get("response")
    if response is not None and not isinstance(response, str):
        raise ConfigError(f"{where}: response: should be text, got {excerpt(response)}")
    texts = {field: values.get(field) for field in ("prompt", "response")} | {"label": label_of(values.get("label"))}
    for field, text in texts.items():
        if isinstance(text, str) and not is_text(text):
            raise ConfigError(f"{where}: {field}: holds half of a surrogate pair, which is not a character")
    prompt = values.get("prompt", values.get("messages"))
    if prompt is None:
        raise ConfigError(f"{where}: prompt: required, a text or a list of messages")
    if isinstance(prompt, str) and "prompt" in values:
        return Row(number, values, prompt, (), response)
    field = "prompt" if "prompt" in values else "messages"
    messages = _messages(prompt, f"{where}: {field}")
    if field == "messages" and response is None and messages[-1]["role"] == "assistant":
        *messages, last = messages
        if not isinstance(last["content"], str) or not messages:
            raise ConfigError(f"{where}: messages: the last should be a response of text, and a question before it")
        response = last["content"]
    return Row(number, values, "", tuple(messages), response)


def is_text(text: str) -> bool:
    """False if half of a surrogate pair is in it, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: should be a list of messages, got {excerpt(value)}")
    for at, message in enumerate(value):
        if not isinstance(message, dict):
            raise ConfigError(f"{where}[{at}]: should be a mapping, got {excerpt(message)}")
        for name in ("role", "content"):
            if name not in message:
                raise ConfigError(f"{where}[{at}].{name}: required")
        if not isinstance(message["role"], str):
            raise ConfigError(f"{where}[{at}].role: should be text, got {excerpt(message['role'])}")
    return value


def rows(file: BinaryIO, name: str) -> Iterator[Row]:
    """The rows of an open file, one at a time; empty lines are passed over. ConfigError as `parse` raises it, and for
    a line of more than LONGEST bytes."""
    for number, _, line in lines(file, name):
        yield parse(line, number, name)


def lines(file: BinaryIO, name: str) -> Iterator[tuple[int, int, bytes]]:
    """Number, from 1, offset in bytes since the beginning, and bytes of each line that is not empty."""
    number = offset = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise ConfigError(f"{name}, line {number}: more than {LONGEST // MIB} MiB")
        if line.strip():
            yield number, offset, line
        offset += len(line)


def hold(file: BinaryIO, path: Path) -> None:
    """Keeps a file that is written to from other processes until it is closed. ConfigError if one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path}: another command is writing it; wait for its end, or give another --output"
        ) from None


def dumped(values: Mapping[str, Any]) -> bytes:
    """A line of JSONL, in UTF-8."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    return (text if is_text(text) else json.dumps(values, allow_nan=False)).encode() + b"\n"


class RowFile:
    """A file of rows that was read once from end to end, and of which each row can be read again. In memory is a few
    numbers for each row. A context, which closes the file."""

    def __init__(self, path: Path, check: Callable[[Row], None] = lambda row: None) -> None:
        """Checks all rows. ConfigError names line and field of one that is wrong; `check` may raise it too."""
        self.path = path
        digest = hashlib.sha256()
        self._offsets, self._lines = array("q"), array("q")
        self._file = path.open("rb")
        try:
            for number, offset, line in lines(self._file, str(path)):
                row = parse(line, number, str(path))
                check(row)
                digest.update(line)
                self._offsets.append(offset)
                self._lines.append(number)
            if not self._offsets:
                raise ConfigError(f"{path}: holds no rows")
        except BaseException:
            self._file.close()
            raise
        self.hash = digest.hexdigest()
        """sha256 of the lines."""

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        self._file.seek(self._offsets[index])
        return parse(self._file.readline(), self._lines[index], str(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
