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
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse

from quartet.seams.vllm import NEWER
from quartet.serving.http import Streamed, refused
from quartet.serving.in_turn import InTurn
from quartet.serving.share import Share
from quartet.wire.errors import InvalidArgument, ServiceError
from quartet.wire.json_object import json_object
from services.rollout.histories import object_of
from services.rollout.openai_fields import COUNT, FIELDS, WITHOUT_EFFECT, check_stop_texts, fields_of
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

    def __init__(self, serving: AnthropicServingMessages, answer: Answers, reading: InTurn, tokenizer: Any) -> None:
        """`serving` converts answers, `answer` gives them, `reading` has one body read at a time, and `tokenizer` has
        the chat template."""
        self._serving, self._chat, self._reading, self._tokenizer = serving, answer, reading, tokenizer

    async def answer(self, path: str, body: bytes, share: Share, session: OpenSession | None) -> Response:
        """Answers a request for a message, or for the number of tokens of its prompt; errors in Anthropic's form."""
        try:
            asked = await self._reading.do(partial(_as_chat, body, path, self._tokenizer), len(body))
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
            call["function"]["arguments"] = json.dumps(object_of(call["function"]["arguments"]))
        made: Any = self._serving.messages_full_converter(ChatCompletionResponse.model_validate(said))
        message: dict[str, Any] = made.model_dump(mode="json", exclude_none=True)
        return message | {"stop_sequence": made.stop_sequence} | told

    async def _events(self, parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream. An error is the last of them. The input of a call comes at once, when it is known
        whether it is an object."""
        failed: dict[str, Any] = {}
        told: dict[str, Any] = {}

        async def good() -> AsyncGenerator[Any, None]:
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
                if not NEWER:
                    yield text
                elif said:
                    yield ChatCompletionStreamResponse.model_validate(said)

        async with aclosing(good()) as come, aclosing(self._serving.message_stream_converter(come)) as events:
            written: list[str] | None = None
            async for event in events:
                if failed:  # what would make a whole message of what came
                    break
                name, _, data = event.removeprefix("event: ").rstrip("\n").partition("\ndata: ")
                if name == "content_block_start":
                    written = [] if json.loads(data)["content_block"]["type"] == "tool_use" else None
                elif name == "content_block_delta" and written is not None:
                    written.append(json.loads(data)["delta"]["partial_json"])
                    continue
                elif name == "content_block_stop" and written is not None:
                    delta = {"type": "input_json_delta", "partial_json": json.dumps(object_of("".join(written)))}
                    yield _event("content_block_delta", {"index": json.loads(data)["index"], "delta": delta})
                yield _event(name, json.loads(data) | told) if name == "message_delta" else event.encode()
        if failed:
            status = int(failed.get("code") or 500)
            yield _event("error", _error(status, failed["message"]))


def _as_chat(body: bytes, path: str, tokenizer: Any) -> bytes:
    """The request as one of OpenAI's protocol. InvalidArgument names the field that is wrong."""
    given = fields_of(json_object(body), FIELDS[path], path)
    stop = given.pop("stop_sequences", [])
    if not isinstance(stop, list):
        raise InvalidArgument("stop_sequences: should be a list of texts")
    check_stop_texts("stop_sequences", stop)
    if given.get("tools") == []:  # which clients send that have none, and vLLM refuses
        del given["tools"]
    named = given.get("model", "") != ""
    kind: Any = AnthropicCountTokensRequest if path == COUNT else AnthropicMessagesRequest
    try:
        fields = {name: given[name] for name in given.keys() - WITHOUT_EFFECT}
        request = kind.model_validate(fields if named else {**fields, "model": "any"})  # its class wants a name
        _check_content(request)
        later = any(message.role == "system" for message in request.messages)
        chat: Any = AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=later and not _takes_later_system(tokenizer)
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidArgument(f"{'.'.join(map(str, first['loc']))}: {first['msg'][:300]}") from None
    except ValueError as error:
        raise InvalidArgument(f"messages: {str(error)[:300]}") from None
    made = chat.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if stop:
        made["stop"] = stop  # here, as vLLM's classes take four at most
    if not named:
        del made["model"]
    if path == COUNT:
        made = {name: made[name] for name in ("model", "messages", "tools") if name in made}
    return json.dumps(made, ensure_ascii=False).encode()  # no longer than the body that came, which is bounded


def _takes_later_system(tokenizer: Any) -> bool:
    """True if the chat template takes a system message that does not lead, as Anthropic's protocol has them."""
    roles = ("system", "user", "system", "user")
    try:
        said = [{"role": role, "content": "a"} for role in roles]
        tokenizer.apply_chat_template(said, chat_template=tokenizer.get_chat_template(), tokenize=False)
    except Exception:  # a template raises what it likes
        return False
    return True


def _check_content(request: Any) -> None:
    """Raises InvalidArgument for content that vLLM's conversion would leave out, invent a number for or fail at."""
    if isinstance(request.system, list):
        _check_texts([block.model_dump() for block in request.system], "system")
    for place, message in enumerate(request.messages):
        for index, block in enumerate(() if isinstance(message.content, str) else message.content):
            where = f"messages[{place}].content[{index}]"
            if block.type in ("image", "tool_reference"):
                raise InvalidArgument(
                    f"{where}: {block.type}; content should be a text, a call, a result or thinking"
                )
            if block.type == "tool_use" and not (block.id and block.name):
                raise InvalidArgument(f"{where}: should have an `id` and a `name`")
            if block.type == "tool_result":
                if not block.tool_use_id:
                    raise InvalidArgument(f"{where}.tool_use_id: missing; should be the `id` of a call")
                if isinstance(block.content, list):
                    _check_texts(block.content, f"{where}.content")


def _check_texts(blocks: list[dict[str, Any]], where: str) -> None:
    for index, block in enumerate(blocks):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise InvalidArgument(f'{where}[{index}]: should be {{"type": "text", "text": ...}}')


def _event(name: str, said: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name} | said)}\n\n".encode()


def _error(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _TYPES.get(status, "api_error"), "message": message}}
