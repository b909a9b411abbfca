"""Histories of messages: which response a request goes on after, and on which tokens."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quartet.wire.errors import InvalidArgument
from quartet.wire.json_bounds import check_bounds
from quartet.wire.json_object import strict_json, whole_characters
from services.rollout.sessions import NOTHING, Begun

MOST_PARTS = 4096
"""Most elements of a call's arguments that are compared by their meaning, and of more as they are written."""


def digests(given: Mapping[str, Any]) -> list[bytes]:
    """Digests of a request's messages up to each of them.

    What a client is free to leave out of what it was answered, such as the reasoning and the numbers of calls, does
    not count. Tools and variables of the template do, since they are written into the prompt.
    """
    said = [given.get("tools"), given.get("chat_template_kwargs")]
    made, digest = [], _digest(b"", said)
    for message in given.get("messages", ()):
        digest = _digest(digest, essence(message))
        made.append(digest)
    return made


def answered(asked: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest of a request's messages and the answer to them, from that of the messages."""
    return _digest(asked, essence(message))


def essence(message: Mapping[str, Any]) -> list[Any]:
    """A message's role, text, calls and names; of two that mean the same, the same."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], _plain(function["arguments"])] for function in functions]
    return [message.get("role"), text, calls, message.get("name"), message.get("tool_call_id")]


def object_of(arguments: str) -> dict[str, Any]:
    """A call's arguments, with halves of characters replaced; an empty object where a model wrote what no client
    could read and send back: no JSON, no object, numbers that JSON does not have, or more levels than a request may
    have. vLLM too reads an empty object where it can read none."""
    try:
        text = whole_characters(arguments)
        check_bounds(text.encode())
        read = json.loads(whole_characters(json.dumps(strict_json(text), ensure_ascii=False)))
    except (ValueError, InvalidArgument):
        return {}
    return read if isinstance(read, dict) else {}


def _plain(arguments: str) -> str:
    """Arguments of a call, however a client has written them out again: JavaScript's have 1 for 1.0."""
    # The bounds of a request's elements and depth do not count those within its texts.
    if sum(map(arguments.count, "[{,")) > MOST_PARTS:
        return arguments
    return json.dumps(json.loads(json.dumps(object_of(arguments)), parse_int=float), sort_keys=True)


def carried(messages: Sequence[Mapping[str, Any]]) -> Begun:
    """The tokens that the last message which brings its own does, in the form of NeMo-Gym; none if none does."""
    for count in range(len(messages), 0, -1):
        message = messages[count - 1]
        if message.get("prompt_token_ids") and message.get("generation_token_ids"):
            ids = np.asarray([*message["prompt_token_ids"], *message["generation_token_ids"]], np.int32)
            return Begun(ids, count)
    return NOTHING


class Told:
    """The message of an answer, put together from the parts that a stream has brought."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Takes the `delta` of an event."""
        self._texts.append(delta.get("content") or "")
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            call = self._calls.setdefault(int(part.get("index") or 0), {"name": "", "arguments": ""})
            for name in call:
                call[name] += function.get(name) or ""

    @property
    def message(self) -> dict[str, Any]:
        """The message."""
        calls = [{"function": call} for _, call in sorted(self._calls.items())]
        return {"role": "assistant", "content": "".join(self._texts), "tool_calls": calls}


def _digest(before: bytes, said: Any) -> bytes:
    return hashlib.blake2b(before + json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()
