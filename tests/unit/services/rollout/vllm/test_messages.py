"""Streams of Anthropic's protocol by a class of vLLM that reads objects, as from 0.33 on. With the installed one, and
all else of the protocol: test_openai.py."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import Response

from quartet.serving.http import Streamed
from quartet.serving.in_turn import InTurn
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from services.rollout.session_holder import OpenSession
from services.rollout.vllm import messages
from services.rollout.vllm.messages import Messages
from tests.models import make_tokenizer

PATH = "/v1/messages"
ASKED = {"model": "mine", "messages": [{"role": "user", "content": "w5"}], "max_tokens": 2, "stream": True}
CHUNK = {"id": "1", "created": 0, "model": "mine", "policy_version": 4}
SPANS = [{"version": 4, "start": 0, "end": 1}]
SAID = CHUNK | {"choices": [{"index": 0, "delta": {"content": "w10"}, "version_spans": SPANS}]}
END = CHUNK | {"choices": []}


class Converting:
    """A piece for each chunk that says something. The end of the stream is that of a message, whatever ended it."""

    async def message_stream_converter(self, chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for chunk in chunks:
            for choice in chunk.choices:
                yield written("content_block_delta", delta={"type": "text_delta", "text": choice.delta.content})
            if not chunk.choices:
                yield written("message_delta", delta={"stop_reason": "end_turn"})
        yield written("message_stop")


def written(name: str, **said: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name} | said)}\n\n"


async def streamed(*chunks: Any) -> list[dict[str, Any]]:
    """The events of an answer whose chat is streamed as these chunks."""

    async def parts() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def answer(path: str, body: bytes, share: Share, session: OpenSession | None) -> Response:
        return Streamed(parts(), close)  # type: ignore[arg-type]

    async def close() -> None:
        pass

    serving: Any = Converting()
    tokenizer: Any = make_tokenizer()
    me = Share("me", Purpose.FOREIGN, "declared")
    reply = await Messages(serving, answer, InTurn(), tokenizer).answer(PATH, json.dumps(ASKED).encode(), me, None)
    assert isinstance(reply, Streamed)
    return [json.loads(part.decode().partition("\ndata: ")[2]) async for part in reply.parts]


@pytest.fixture(autouse=True)
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "NEWER", True)


async def test_chunks_are_read_as_objects_and_the_end_says_which_weights_sampled() -> None:
    delta, last, end = await streamed(SAID, END)
    assert delta["delta"]["text"] == "w10"
    assert (last["policy_version"], last["version_spans"]) == (4, SPANS)
    assert end["type"] == "message_stop"


async def test_what_came_before_an_error_is_no_whole_message() -> None:
    got = await streamed(SAID, {"error": {"message": "gone", "code": 503}})
    assert [event["type"] for event in got] == ["content_block_delta", "error"]
    assert got[-1]["error"]["type"] == "overloaded_error"
