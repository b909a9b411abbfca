"""OpenAI's protocol by vLLM's own serving classes, around the engine of a replica.

vLLM renders prompts, writes answers and streams. Quartet decides which requests are taken and when they start, as for
calls over gRPC, and adds to each answer the versions of the weights that sampled it.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response
from vllm import SamplingParams
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.config.base import ConfigError
from quartet.seams.vllm import NEWER, decode_tokens_once, end_late_renders
from quartet.serving.desk import Desk
from quartet.serving.http import Streamed
from quartet.serving.in_turn import InTurn
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from quartet.wire.identity import folder_name
from services.rollout.config import RolloutConfig
from services.rollout.histories import carried, digests
from services.rollout.http import Served
from services.rollout.interface import NO_VERSION
from services.rollout.openai_fields import COUNT, GENERATE, MESSAGES, TOKEN_FIELDS, of_session, read, rows_of
from services.rollout.session_holder import OpenSession
from services.rollout.vllm.following import following
from services.rollout.vllm.messages import Messages
from services.rollout.vllm.openai_call import DONE, OpenAICall, Turn, no_room, refused
from services.rollout.vllm.requests import Requests

log = logging.getLogger("quartet")
TOLD = frozenset({"tokenizer_class", "bos_token", "eos_token", "pad_token", "unk_token", "model_max_length"})
"""Facts about a tokenizer that are told."""
_AT_ONCE = 1 << 12
"""Most tokens and log-probs of an answer that is written on the event loop, within some hundredths of a second."""
_BYTES = 128
"""Bytes of an answer for a log-prob that it lists."""
LATE = "messages: the model's chat template did not render them in time; send fewer or shorter ones"
_CHAT = "/v1/chat/completions"
_PROMPT = frozenset({"input_text", "input_tokens"})
"""Names by which vLLM refuses a prompt that is longer than the model takes."""
_SAMPLES = frozenset({"/v1/completions", _CHAT, GENERATE})
_CALL: ContextVar[OpenAICall] = ContextVar("call")
"""The call that is being answered."""


class VLLMCompletions:
    """Answers requests of one replica."""

    def __init__(self, config: RolloutConfig, served: Served) -> None:
        self._served, self._folder = served, folder_name(config.model)
        engine: Any = served.engine
        self._requests: Requests = engine.requests
        self._desk, self._calls_tools = Desk(config.limits), config.tool_parser is not None
        self._reading = InTurn()
        llm: AsyncLLM = engine.llm
        self._renderer = llm.renderer
        end_late_renders(llm.renderer)
        decode_tokens_once()
        self.sampled = 0
        """Number of tokens that have been sampled for requests over HTTP."""
        self._names: list[BaseModelPath] = []
        client: Any = _Attended(llm)
        self._models = OpenAIServingModels(client, self._names)
        parsers: dict[str, Any] = {
            **{"enable_auto_tools": self._calls_tools, "tool_parser": config.tool_parser},
            **{"reasoning_parser": config.reasoning_parser or ""},
        }
        template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
        try:
            renderer = OnlineRenderer(llm.model_config, llm.renderer, request_logger=None, **template, **parsers)
            given: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
            talking = given | template | parsers
            chat: Any = OpenAIServingChat(client, self._models, "assistant", **talking)
            # A second object, as one of this class may write every stream in Anthropic's form.
            messages: Any = AnthropicServingMessages(client, self._models, "assistant", **talking)
        except TypeError as error:
            names = f"tool_parser: {config.tool_parser}, reasoning_parser: {config.reasoning_parser}"
            raise ConfigError(f"rollout.args.{names}: {error}") from None
        completion: Any = OpenAIServingCompletion(client, self._models, **given)
        # What makes messages of a response's tokens is for an `output_mode` that no request has here.
        more = {"online_derenderer": None} if NEWER else {}
        tokens: Any = ServingTokens(client, self._models, renderer, request_logger=None, **more)
        # As over gRPC, and unlike `vllm serve`, what a request leaves out is not taken from generation_config.json:
        # the model is sampled as it is, which is what its log-probs are of.
        completion.default_sampling_params = chat.default_sampling_params = tokens.default_sampling_params = {}
        # vLLM writes a whole answer on the event loop, which takes seconds for many log-probs.
        write = "request_output_to_completion_response"
        setattr(completion, write, partial(partial, getattr(completion, write)))
        chat.chat_completion_full_generator = _later(chat.chat_completion_full_generator)
        tokens.serve_tokens_full_generator = _later(tokens.serve_tokens_full_generator)
        self._tokens = ServingTokenization(self._models, renderer, **template)
        self._messages = Messages(messages, self.answer, self._reading, llm.renderer.get_tokenizer())
        self._routes: dict[str, tuple[Any, Callable[..., Any]]] = {
            "/v1/completions": (CompletionRequest, completion.create_completion),
            _CHAT: (ChatCompletionRequest, chat.create_chat_completion),
            GENERATE: (GenerateRequest, tokens.serve_tokens),
            "/tokenize": (TokenizeCompletionRequest, self._tokens.create_tokenize),
            "/detokenize": (DetokenizeRequest, self._tokens.create_detokenize),
        }

    async def models(self) -> Any:
        """The model under its names, with the version of its weights and the checksum of the push that brought
        them."""
        self._name()
        engine = self._served.engine
        listed = (await self._models.show_available_models()).model_dump()
        for card in listed["data"]:
            card |= {"owned_by": "quartet", "policy_version": engine.version, "weights_checksum": engine.checksum}
        return listed

    async def tokenizer_info(self) -> Any:
        """The tokenizer's special tokens and template, without the places of its files."""
        told = (await self._tokens.get_tokenizer_info()).model_dump()
        template = self._served.engine.tokenizer.chat_template
        return {name: told[name] for name in TOLD & told.keys()} | {"chat_template": template}

    async def answer(self, path: str, body: bytes, share: Share, session: OpenSession | None) -> Response:
        """Answers a request. See Completions.answer."""
        if path in (MESSAGES, COUNT):
            return await self._messages.answer(path, body, share, session)
        kind, create = self._routes[path]
        given = await self._reading.do(partial(read, body, path), len(body))
        if kind is TokenizeCompletionRequest and "messages" in given:
            kind = TokenizeChatRequest
        for token in given.get("tokens", ()):
            if token >= self._served.engine.vocab_size:
                raise InvalidArgument(f"tokens: {token} is outside the vocabulary")
        if kind is ChatCompletionRequest and given.get("tools") and given.get("tool_choice") != "none":
            self._check_calls_tools()
        self._served.admission.check_call("rows", rows_of(given), "prompt")
        if self._served.engine.version == NO_VERSION:
            raise Unavailable("the weights of this replica are incomplete; a push that completes them is awaited")
        self._name()
        version, longest = self._version_of(given.get("model")), self._served.engine.max_length
        versions = None if version is None else (version, version)
        begun, held, bounded = carried(given.get("messages", ())), None, False
        if session is not None and path in _SAMPLES:
            # In a thread, as there may be thousands of messages.
            known = await asyncio.to_thread(digests, given) if path == _CHAT else []
            found, terms, turn = await session.begun(known)
            held = Turn(session, turn, known[-1] if known else b"")
            begun = found if found.messages >= begun.messages else begun
            longest = min(longest, terms.max_length or longest)
            if terms.purpose is not Purpose.FOREIGN:
                share = replace(share, purpose=terms.purpose)
            try:
                given = of_session(given, terms, turn)
                if terms.bounds:
                    self._served.check(terms.versions)
                    if versions is None and terms.versions.HasField("max_version"):
                        versions, bounded = (terms.versions.min_version, terms.versions.max_version), True
            except ServiceError:
                await session.leave(turn)
                raise
        call = OpenAICall(self._served, self._requests, share, versions, longest, held, bounded=bounded)
        # Their log-probs are in a message that brings them, whether or not they are asked for otherwise.
        tells = path == _CHAT and given.get("return_token_ids") and not given.get("stream")
        call.keeps |= bool(tells)
        try:
            given = _prepared(given, path)
            request = _parsed(kind, given)
            call.check_room(len(given.get("token_ids", ())))
            async with self._desk.turn(share, len(body)) as call.leave_desk:
                if begun.messages and kind is ChatCompletionRequest:
                    engine = self._served.engine
                    if (largest := int(begun.ids.max())) >= engine.vocab_size:
                        raise InvalidArgument(f"messages: {largest} among their tokens is outside the vocabulary")
                    ids = await following(self._renderer, engine, request, given["messages"], begun)
                    if ids is not None:
                        call.check_room(len(ids))
                        # vLLM reads such ids in the place of the messages.
                        request.kv_transfer_params = {"prompt_token_ids": ids.tolist()}
                reply = await self._created(create, request, call)
            if isinstance(reply, Response):
                await self._close(call)
                return reply
            return Streamed(reply, partial(self._close, call))
        except TimeoutError:
            await self._close(call)
            raise InvalidArgument(LATE) from None
        except BaseException:
            await self._close(call)
            raise

    async def _close(self, call: OpenAICall) -> None:
        self.sampled += call.sampled
        try:
            if call.turn is not None and not call.recorded:
                await call.turn.session.leave(call.turn.number, full=call.full)
        finally:
            await call.close()

    def _check_calls_tools(self) -> None:
        if not self._calls_tools:
            raise InvalidArgument(
                "tools: this application has no tool_parser (rollout.args), which would find the model's calls; send "
                "tool_choice: none if it is to make none"
            )

    def _name(self) -> None:
        """Gives vLLM the names under which the model is served now: that of the run, or of the model's folder before
        any, and both with the version."""
        name = self._served.run() or self._folder
        # The list stays the same, as vLLM's classes share it. No path of this machine is told.
        self._names[:] = [BaseModelPath(each, name) for each in (name, f"{name}@{self._served.engine.version}")]

    def _version_of(self, name: Any) -> int | None:
        """The version that a name of the model means; None for the newest. NotFound for a name that is not served:
        vLLM would say so too, and write each into the log."""
        newest, versioned = (served.name for served in self._names)
        if isinstance(name, str) and name and name not in (newest, versioned):
            raise NotFound(f"model: {name[:64]!r} is not served; served are {newest}, {versioned}")
        return self._served.engine.version if name == versioned else None

    async def _created(
        self, create: Callable[..., Any], request: Any, call: OpenAICall
    ) -> Response | AsyncGenerator[bytes, None]:
        """The whole answer, or the events of a stream that has begun without an error."""
        token = _CALL.set(call)
        try:
            made = await create(request, None)
            if not isinstance(made, ErrorResponse | AsyncGenerator):
                made = await self._written(call, partial(call.whole, made))
        except (ServiceError, TimeoutError):
            raise
        except EngineDeadError:
            raise Unavailable("the engine of this replica died; ask again") from None
        except Exception as error:
            if isinstance(error, VLLMValidationError) and (error.parameter, error.value) == ("max_tokens", 0):
                # What a prompt leaves of the model's length: `read` takes 0 with `echo` alone, where vLLM samples 1.
                call.full = True
                raise InvalidArgument(no_room(self._served.engine.max_length)) from None
            call.full = isinstance(error, VLLMValidationError) and error.parameter in _PROMPT
            made = create_error_response(error)
            if made.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                log.exception("a request over HTTP failed")
        finally:
            _CALL.reset(token)
        if isinstance(made, ErrorResponse):
            return refused(made.model_dump()["error"])
        if isinstance(made, dict):
            await call.record(made)
            return Response(await self._written(call, partial(to_json, made)), media_type="application/json")
        call.begin()  # here, as vLLM would make an event of a refusal, and write a trace into the log
        # Errors that it finds late are the first event, where they can still become a status.
        events = _events(made, call.with_versions)
        first = await anext(events, None)
        if first is not None and "error" in first:
            await events.aclose()
            return refused(first["error"])
        return call.texts(first, events)

    async def _written(self, call: OpenAICall, write: Callable[[], Any]) -> Any:
        """Writes an answer by `write`; a long one beside the event loop and one at a time, callers taking turns."""
        if call.size <= _AT_ONCE:
            return write()
        async with self._desk.turn(call.share, call.size * _BYTES):
            return await asyncio.to_thread(write)


def _later(write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Callable[[], Any]]]:
    """Divides a function of vLLM's that awaits the outputs of a request and writes the answer: awaits them, and
    returns a function that writes it."""

    async def read(request: Any, outputs: AsyncGenerator[Any, None], *more: Any, **named: Any) -> Callable[[], Any]:
        come = [output async for output in outputs]

        async def again() -> AsyncGenerator[Any, None]:
            for output in come:
                yield output

        def answer() -> Any:
            try:
                write(request, again(), *more, **named).__await__().send(None)
            except StopIteration as written:
                return written.value
            raise RuntimeError("vLLM waits for more than the outputs of a request")

        return answer

    return read


def _prepared(given: dict[str, Any], path: str) -> dict[str, Any]:
    """The request without what vLLM does not know."""
    if path == GENERATE:
        sampling = given["sampling_params"]
        return {**given, "sampling_params": {"detokenize": bool(sampling.get("stop")), **sampling}}
    if "messages" not in given:
        return given
    plain = [{key: message[key] for key in message.keys() - set(TOKEN_FIELDS)} for message in given["messages"]]
    return {**given, "messages": plain}


def _parsed(kind: Any, given: dict[str, Any]) -> Any:
    # Its class takes four texts at most that end a response; `read` has checked them by its own bound.
    stop = given.get("stop")
    try:
        request = kind.model_validate({**given, "stop": []} if stop else given)
        if stop:
            request.stop = stop
        return request
    except ValidationError as error:
        first = error.errors()[0]
        where = clean_loc_for_param(first["loc"]) if first["loc"] else ""
        raise InvalidArgument(f"{where or 'the request'}: {first['msg'][:300]}") from None
    except VLLMClientError as error:
        raise InvalidArgument(create_error_response(error).error.message[:1000]) from None


async def _events(
    stream: AsyncGenerator[str, None], completed: Callable[[dict[str, Any]], dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    """The contents of a stream's events but the last, which says that it is done; `completed` at once, before the
    next output is read, but for errors."""
    async with aclosing(stream):
        async for text in stream:
            # Not by splitlines, which also divides at characters that a JSON text may hold.
            for line in text.split("\n"):
                content = line.removeprefix("data: ")
                if content and content != DONE:
                    event = json.loads(content)
                    yield event if "error" in event else completed(event)


class _Attended:
    """vLLM's engine as its serving classes see it, whose requests belong to the call that is being answered."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[Any, None]:
        """Takes a request at once, or raises, and returns its outputs. vLLM calls it before an answer begins."""
        return _CALL.get().take(prompt["prompt_token_ids"], sampling_params, prompt.get("cache_salt") or "")
