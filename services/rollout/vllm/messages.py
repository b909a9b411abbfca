"""Anthropic's Messages protocol, by vLLM's own conversions: a request becomes one of OpenAI's chat, which is answered
as any other is, and the answer a message of Anthropic's."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from quartet.serving.http import Streamed, refused
from quartet.serving.in_turn import InTurn
from quartet.serving.share import Share
from quartet.wire.errors import InvalidArgument, ServiceError
from quartet.wire.json_object import json_object
from services.rollout.openai_fields import COUNT, FIELDS, WITHOUT_EFFECT, check_names
from services.rollout.session_holder import OpenSession

_CHAT, _TOKENIZE = "/v1/chat/completions", "/tokenize"
_TOLD = ("policy_version", "weights_checksum", "proved", "session")
"""Fields of an answer beside the protocol: those of the weights, and of its session."""
_TYPES = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
"""Status -> Anthropic's name of the error; of others `api_error`."""
Answers = Callable[[str, bytes, Share, OpenSession | None], Awaitable[Response]]
"""Answers a request of OpenAI's protocol, as Completions.answer does."""


class Messages:
    """Answers requests of one replica."""

    def __init__(self, serving: AnthropicServingMessages, answer: Answers, reading: InTurn) -> None:
        """`serving` converts answers, `answer` gives them, and `reading` has one body read at a time."""
        self._serving, self._chat, self._reading = serving, answer, reading

    async def answer(self, path: str, body: bytes, share: Share, session: OpenSession | None) -> Response:
        """Answers a request for a message, or for the number of tokens of its prompt; errors in Anthropic's form."""
        try:
            asked = await self._reading.do(partial(_as_chat, body, path), len(body))
            reply = await self._chat(_TOKENIZE if path == COUNT else _CHAT, asked, share, session)
        except ServiceError as error:
            reply = refused(error, path)
        if isinstance(reply, Streamed):
            return Streamed(self._events(reply.parts), reply.aclose)
        said = json.loads(bytes(reply.body))
        if reply.status_code >= 400:
            headers = {"retry-after": reply.headers["retry-after"]} if "retry-after" in reply.headers else None
            return JSONResponse(_error(reply.status_code, said["error"]["message"]), reply.status_code, headers)
        return JSONResponse({"input_tokens": said["count"]} if path == COUNT else self._message(said))

    def _message(self, said: dict[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        told = {name: said.pop(name) for name in _TOLD if name in said}
        [choice] = said["choices"]
        told["version_spans"] = choice.pop("version_spans")
        for call in choice["message"].get("tool_calls") or ():
            call["function"]["arguments"] = json.dumps(_object(call["function"]["arguments"]))
        made: Any = self._serving.messages_full_converter(ChatCompletionResponse.model_validate(said))
        message: dict[str, Any] = made.model_dump(mode="json", exclude_none=True)
        return message | {"stop_sequence": made.stop_sequence} | told

    async def _events(self, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream. An error is the last of them."""
        failed: dict[str, Any] = {}
        told: dict[str, Any] = {}

        async def good() -> AsyncGenerator[str, None]:
            async for part in parts:
                text = part.decode()
                content = text.removeprefix("data: ").strip()
                said = json.loads(content) if content.startswith("{") else {}
                if "error" in said:
                    failed.update(said["error"])
                    return
                told.update({name: said[name] for name in _TOLD if name in said})
                for choice in said.get("choices", ()):
                    told["version_spans"] = choice["version_spans"]
                yield text

        async with aclosing(good()) as come, aclosing(self._serving.message_stream_converter(come)) as events:
            async for event in events:
                yield _with(event, told).encode() if event.startswith("event: message_delta\n") else event.encode()
        if failed:
            status = int(failed.get("code") or 500)
            yield f"event: error\ndata: {json.dumps(_error(status, failed['message']))}\n\n".encode()


def _as_chat(body: bytes, path: str) -> bytes:
    """The request as one of OpenAI's protocol. InvalidArgument names the field that is wrong."""
    given = {name: value for name, value in json_object(body).items() if value is not None}
    check_names(given, FIELDS[path], path)
    kind: Any = AnthropicCountTokensRequest if path == COUNT else AnthropicMessagesRequest
    try:
        request = kind.model_validate({name: given[name] for name in given.keys() - WITHOUT_EFFECT})
        chat: Any = AnthropicServingMessages.to_chat_completion_request(request)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(f"{'.'.join(map(str, first['loc']))}: {first['msg'][:300]}") from None
    except ValueError as error:
        raise InvalidArgument(f"messages: {str(error)[:300]}") from None
    made = chat.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if path == COUNT:
        made = {name: made[name] for name in ("model", "messages", "tools") if name in made}
    return json.dumps(made).encode()


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; an empty object where a model wrote something else, as vLLM reads such."""
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _with(event: str, told: dict[str, Any]) -> str:
    """The event with further fields."""
    name, _, data = event.rstrip("\n").partition("\ndata: ")
    return f"{name}\ndata: {json.dumps(json.loads(data) | told)}\n\n"


def _error(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _TYPES.get(status, "api_error"), "message": message}}
