"""OpenAI's protocol by vLLM's own serving classes, around the engine of a replica.

vLLM renders prompts, writes answers and streams. Quartet decides which requests are taken and when they start, as for
calls over gRPC, and adds to each answer the versions of the weights that sampled it.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response
from vllm import SamplingParams
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
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet.config.base import ConfigError
from quartet.seams.vllm import decode_tokens_once, end_late_renders
from quartet.serving.desk import Desk
from quartet.serving.http import Streamed, refusal
from quartet.serving.in_turn import InTurn
from quartet.serving.share import Share
from quartet.serving.slots import Running
from quartet.trajectory import Segment
from quartet.wire.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from quartet.wire.http_errors import HttpError, http_error
from services.rollout.config import RolloutConfig
from services.rollout.histories import Told, answered, carried, digests
from services.rollout.http import Served
from services.rollout.interface import NO_VERSION, check_least
from services.rollout.openai_fields import GENERATE, TOKEN_FIELDS, check_of_session, read, rows_of
from services.rollout.sample import VersionSpans
from services.rollout.session_holder import OpenSession
from services.rollout.vllm.following import following
from services.rollout.vllm.requests import Requests
from services.rollout.vllm.scheduler import AT_ONCE_KEY, STREAMED_KEY

log = logging.getLogger("quartet")
STILL_S = 2.0
"""Seconds without an output after which it is asked whether the engine still answers."""
TOLD = frozenset({"tokenizer_class", "bos_token", "eos_token", "pad_token", "unk_token", "model_max_length"})
"""Facts about a tokenizer that are told."""
MOST_LISTED = 1 << 17
"""Most log-probs that an answer may list. Each takes time of the process that serves all callers of the replica, and
about 1 KB until the answer is sent."""
_AT_ONCE = 1 << 12
"""Most tokens and log-probs of an answer that is written on the event loop, within some hundredths of a second."""
_BYTES = 128
"""Bytes of an answer for a log-prob that it lists."""
LATE = "messages: the model's chat template did not render them in time; send fewer or shorter ones"
_DONE, _CHAT = "[DONE]", "/v1/chat/completions"
_SAMPLES = frozenset({"/v1/completions", _CHAT, GENERATE})
_SEEDS = 1 << 63
"""Number of seeds; the engine would die of a larger one."""


class VLLMCompletions:
    """Answers requests of one replica."""

    def __init__(self, config: RolloutConfig, served: Served) -> None:
        self._served, self._folder = served, Path(config.model).name
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
            chat: Any = OpenAIServingChat(client, self._models, "assistant", **given, **template, **parsers)
        except TypeError as error:
            names = f"tool_parser: {config.tool_parser}, reasoning_parser: {config.reasoning_parser}"
            raise ConfigError(f"rollout.args.{names}: {error}") from None
        completion: Any = OpenAIServingCompletion(client, self._models, **given)
        tokens: Any = ServingTokens(client, self._models, renderer, request_logger=None)
        # As over gRPC, and unlike `vllm serve`, what a request leaves out is not taken from generation_config.json:
        # the model is sampled as it is, which is what its log-probs are of.
        completion.default_sampling_params = chat.default_sampling_params = tokens.default_sampling_params = {}
        # vLLM writes a whole answer on the event loop, which takes seconds for many log-probs.
        write = "request_output_to_completion_response"
        setattr(completion, write, partial(partial, getattr(completion, write)))
        chat.chat_completion_full_generator = _later(chat.chat_completion_full_generator)
        tokens.serve_tokens_full_generator = _later(tokens.serve_tokens_full_generator)
        self._tokens = ServingTokenization(
            self._models, renderer, chat_template=None, chat_template_content_format="auto"
        )
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
        version = self._version_of(given.get("model"))
        call = _Call(self._served, self._requests, share, version)
        begun = carried(given.get("messages", ()))
        if session is not None and path in _SAMPLES:
            # In a thread, as there may be thousands of messages.
            known = await asyncio.to_thread(digests, given) if path == _CHAT else []
            found, temperature = await session.begun(known)
            given = check_of_session(given, temperature)
            call.turn = _Turn(session, known[-1] if known else b"")
            begun = found if found.messages >= begun.messages else begun
        # Their log-probs are in a message that brings them, whether or not they are asked for otherwise.
        tells = path == _CHAT and given.get("return_token_ids") and not given.get("stream")
        call.keeps = call.turn is not None or bool(tells)
        given = _prepared(given, path)
        request = _parsed(kind, given)
        try:
            async with self._desk.turn(share, len(body)) as call.leave_desk:
                if begun.messages and kind is ChatCompletionRequest:
                    engine = self._served.engine
                    self._check_ids(begun.ids.tolist())
                    ids = await following(self._renderer, engine, request, given["messages"], begun)
                    if ids is not None:
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

    async def _close(self, call: "_Call") -> None:
        self.sampled += call.sampled
        await call.close()

    def _check_calls_tools(self) -> None:
        if not self._calls_tools:
            raise InvalidArgument(
                "tools: this application has no tool_parser (rollout.args), which would find the model's calls; send "
                "tool_choice: none if it is to make none"
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if max(ids) >= self._served.engine.vocab_size:
            raise InvalidArgument(f"messages: {max(ids)} among their tokens is outside the vocabulary")

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
        self, create: Callable[..., Any], request: Any, call: "_Call"
    ) -> Response | AsyncGenerator[bytes, None]:
        """The whole answer, or the events of a stream that has begun without an error."""
        token = _CALL.set(call)
        try:
            made = await create(request, None)
            if not isinstance(made, ErrorResponse | AsyncGenerator):
                made = await self._written(call, partial(call.whole, made))
        except ServiceError:
            raise
        except TimeoutError:
            raise InvalidArgument(LATE) from None
        except EngineDeadError:
            raise Unavailable("the engine of this replica died; ask again") from None
        except Exception as error:
            if isinstance(error, VLLMValidationError) and (error.parameter, error.value) == ("max_tokens", 0):
                # What a prompt leaves of the model's length: `read` takes 0 with `echo` alone, where vLLM samples 1.
                raise InvalidArgument(_no_room(self._served.engine.max_length)) from None
            made = create_error_response(error)
            if made.error.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                log.exception("a request over HTTP failed")
        finally:
            _CALL.reset(token)
        if isinstance(made, ErrorResponse):
            return _refused(made.model_dump()["error"])
        if isinstance(made, dict):
            await call.record(made)
            return Response(await self._written(call, partial(to_json, made)), media_type="application/json")
        call.begin()  # here, as vLLM would make an event of a refusal, and write a trace into the log
        # Errors that it finds late are the first event, where they can still become a status.
        events = _events(made, call.with_versions)
        first = await anext(events, None)
        if first is not None and "error" in first:
            await events.aclose()
            return _refused(first["error"])
        return call.texts(first, events)

    async def _written(self, call: "_Call", write: Callable[[], Any]) -> Any:
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
        first = error.errors(include_url=False, include_input=False)[0]
        where = clean_loc_for_param(first["loc"]) if first["loc"] else ""
        raise InvalidArgument(f"{where or 'the request'}: {first['msg'][:300]}") from None
    except VLLMClientError as error:
        raise InvalidArgument(create_error_response(error).error.message[:1000]) from None


def _refused(error: dict[str, Any]) -> Response:
    """The answer for an error of vLLM's. The text of one that is not the request's fault stays in the log."""
    status, message = int(error["code"]), str(error["message"])
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return refusal(HttpError(status, message[:1000], error.get("param")))
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return refusal(http_error(Unavailable(message[:1000])))
    return refusal(HttpError(status, "the engine failed; see the replica's log"))


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
                if content and content != _DONE:
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


@dataclass(slots=True)
class _Taken:
    """One response of a call."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    salt: str
    place: int
    """Place among the responses to the same prompt, from 0."""
    outputs: asyncio.Queue[Any]
    """Outputs of all responses to the prompt, each as `place` and what came: an output with its spans, or an error,
    and None at the end."""
    spans: VersionSpans = ()
    """Versions of the tokens that were read."""
    ids: list[int] = field(default_factory=list)
    """Tokens that were read, where they are kept."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of these."""

    @property
    def tokens(self) -> int:
        """Most tokens that it may have."""
        return len(self.prompt_ids) + (self.params.max_tokens or 0)

    @property
    def weight(self) -> int:
        """Most tokens, with those whose log-probs are listed beside them."""
        listed = (self.params.max_tokens or 0) * (self.params.logprobs or 0)
        return self.tokens + listed + len(self.prompt_ids) * (self.params.prompt_logprobs or 0)

    @property
    def listed(self) -> int:
        """Most log-probs that are made into one piece of an answer: all but those of a response that is streamed."""
        prompt, response = self.params.prompt_logprobs, self.params.logprobs
        listed = 0 if prompt is None else len(self.prompt_ids) * (1 + prompt)
        if response is not None and self.params.output_kind is not RequestOutputKind.DELTA:
            listed += (self.params.max_tokens or 0) * (1 + response)
        return listed

    def keep(self, response: Any) -> None:
        """Keeps the tokens of an output, which holds all so far unless they come piece by piece."""
        if self.params.output_kind is not RequestOutputKind.DELTA:
            self.ids, self.logprobs = [], []
        self.ids += response.token_ids
        self.logprobs += [
            entry[token].logprob for token, entry in zip(response.token_ids, response.logprobs, strict=True)
        ]

    @property
    def segment(self) -> Segment:
        """The tokens that were kept."""
        return Segment(np.asarray(self.ids, np.int32), np.asarray(self.logprobs, np.float32), self.spans)


class _Turn(NamedTuple):
    """A response that a session is to hold."""

    session: OpenSession
    asked: bytes
    """Digest of the request's messages; empty if it has none."""


class _Call:
    """One call: its requests in the engine, and the versions of what they have sampled."""

    def __init__(self, served: Served, requests: Requests, share: Share, version: int | None) -> None:
        self._served, self._requests, self.share, self._version = served, requests, share, version
        self._taken: list[_Taken] = []
        self._newest: int | None = None
        """Version of the newest token that was read."""
        self._running: Running[None] | None = None
        self._admitted = ExitStack()
        self._refused: ServiceError | None = None
        self.size = 0
        """Most tokens and listed log-probs of its answer."""
        self.turn: _Turn | None = None
        """The turn of a session that it is."""
        self.keeps = False
        """True to keep what is sampled, with its log-probs."""
        self.leave_desk: Callable[[], None] = lambda: None
        """Called when its prompts are tokens."""

    def take(self, prompt_ids: Sequence[int], params: SamplingParams, salt: str) -> AsyncGenerator[Any, None]:
        """Takes one of the call's prompts and returns the outputs of its responses, as vLLM's own engine would. All
        are queued together when the first of them is asked for an output.

        Raises:
            InvalidArgument: the engine could not carry it out.
        """
        self._check(prompt_ids, params)
        self.leave_desk()
        if self.keeps and params.logprobs is None:
            params.logprobs = 0
        # A text that ends a response is looked for in each output, and log-probs of a prompt come with the first; the
        # scheduler would join them to the last.
        if params.stop or params.prompt_logprobs is not None:
            params.extra_args = {**(params.extra_args or {}), AT_ONCE_KEY: True}
        elif params.output_kind is RequestOutputKind.DELTA:
            params.extra_args = {**(params.extra_args or {}), STREAMED_KEY: True}
        # A request for each response, as the engine notes the versions of a request's tokens and not of a choice's.
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        several = [_Taken(prompt_ids, one, salt, place, outputs) for place, one in enumerate(_each(params))]
        self._taken += several
        return self._read(several)

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        engine = self._served.engine
        if self.turn is not None and self._taken:
            raise InvalidArgument("prompt: several; should be one in a session")
        if params.structured_outputs is not None:
            raise InvalidArgument("tools: strict; should be left out, as a grammar would choose tokens for the model")
        if not prompt_ids:
            raise InvalidArgument("prompt: empty; send at least one token")
        if len(prompt_ids) >= engine.max_length:
            raise InvalidArgument(_no_room(engine.max_length))
        if max(prompt_ids) >= engine.vocab_size:
            raise InvalidArgument(f"prompt: {max(prompt_ids)} is outside the vocabulary of {engine.vocab_size}")
        for token in params.stop_token_ids or ():
            if not 0 <= token < engine.vocab_size:
                raise InvalidArgument(f"stop_token_ids: {token} is outside the vocabulary of {engine.vocab_size}")
        check_least(params.min_tokens, engine, "min_tokens")

    def begin(self) -> None:
        """Queues the requests in their caller's share, once.

        Raises:
            InvalidArgument: the answer would list too many log-probs.
            ResourceExhausted: they are too many, or the share is used up.
        """
        if self._refused:
            raise self._refused
        if self._running is None:
            longest = self._served.engine.max_length
            costs = np.asarray([min(taken.tokens, longest) for taken in self._taken], np.int32)
            asked = self.share, len(costs), sum(taken.weight for taken in self._taken), "prompt"
            listed = sum(taken.listed for taken in self._taken)
            self.size = listed + sum(taken.tokens for taken in self._taken)
            try:
                if listed > MOST_LISTED:
                    raise InvalidArgument(
                        f"logprobs: {listed} would be listed, but an answer may list {MOST_LISTED}; send fewer "
                        "prompts in a call, or a smaller max_tokens, logprobs, top_logprobs or prompt_logprobs"
                    )
                self._admitted.enter_context(self._served.admission.admitted(*asked))
            except ServiceError as error:
                self._refused = error
                raise
            self._running = self._served.slots.enter(self.share, costs, self._run)

    async def _run(self, row: int) -> None:
        """Runs a request to its end; what goes wrong is an output too."""
        taken = self._taken[row]
        try:
            async with aclosing(self._requests.stream(taken.prompt_ids, taken.params, taken.salt)) as stream:
                async for come in stream:
                    taken.outputs.put_nowait((taken.place, come))
            taken.outputs.put_nowait((taken.place, None))
        except ServiceError as error:
            refused = GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
            taken.outputs.put_nowait((taken.place, refused))
        except Exception as error:
            taken.outputs.put_nowait((taken.place, error))

    async def _read(self, several: Sequence[_Taken]) -> AsyncGenerator[Any, None]:
        """The outputs of the responses to a prompt: in a stream each as it comes, otherwise the last of all as one.
        Asks from time to time whether the engine still answers."""
        self.begin()
        left, streamed = len(several), several[0].params.output_kind is RequestOutputKind.DELTA
        last: dict[int, Any] = {}
        while left:
            try:
                async with asyncio.timeout(STILL_S):
                    place, come = await several[0].outputs.get()
            except TimeoutError:
                try:
                    self._served.beat()
                except ServiceError as error:
                    raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from None
                continue
            if come is None:
                left -= 1
                continue
            if isinstance(come, Exception):
                raise come
            taken = several[place]
            output, taken.spans = come
            if self._version is not None and any(version != self._version for version, *_ in taken.spans):
                # A push came while it waited or ran.
                served = f"served is {taken.spans[-1][0]}; ask for the newest without a version"
                told = f"model: version {self._version} is not served any more; {served}"
                raise GracefulHTTPError(told, HTTPStatus.NOT_FOUND)
            if taken.spans:
                self._note(taken.spans[-1][0])
            [response] = output.outputs
            response.index = place
            if self.keeps:
                taken.keep(response)
            if streamed:
                yield output
            else:
                last[place] = output
        if not streamed:
            last[0].outputs = [last[place].outputs[0] for place in range(len(several))]
            yield last[0]

    def _note(self, version: int) -> None:
        """Notes the version of a token. Which is newer is told by their order of arrival: a run that goes back to a
        checkpoint uses their numbers again."""
        if version != self._newest:
            came = list(self._served.engine.checksums)
            self._newest = max((version, self._newest), key=lambda each: came.index(each) if each in came else -1)

    def whole(self, made: Any) -> Any:
        """The contents of an answer of vLLM's, or of what writes it, with versions; its error as it is."""
        answer = made() if callable(made) else made
        return answer if isinstance(answer, ErrorResponse) else self.with_versions(answer.model_dump())

    def with_versions(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply with `policy_version`, that of the newest token, the checksum of its weights and the last proof,
        and for each choice `version_spans`, counted from its first token."""
        engine, proof = self._served.engine, self._served.proved()
        version = engine.version if self._newest is None else self._newest
        reply |= {"policy_version": version, "weights_checksum": engine.checksums.get(version, "")}
        reply["proved"] = proof and {"version": proof.policy_version, "difference": proof.difference}
        for choice in reply.get("choices", ()):
            _name_tokens(choice.get("logprobs"))
            choice["version_spans"] = [
                {"version": version, "start": start, "end": end}
                for version, start, end in self._taken[choice["index"]].spans
            ]
        return reply

    async def record(self, reply: dict[str, Any]) -> None:
        """Adds the tokens of a whole answer to its message where they are asked for, in the form of NeMo-Gym, and has
        the session hold them.

        Raises:
            ServiceError: it does not; the answer is lost then.
        """
        if not self.keeps:
            return
        message = None
        for choice, taken in zip(reply.get("choices", ()), self._taken, strict=False):
            message = choice.get("message")
            if message is not None and reply.get("prompt_token_ids"):
                tokens = list(taken.prompt_ids), taken.ids, taken.logprobs
                message |= dict(zip(TOKEN_FIELDS, tokens, strict=True))
        if self.turn is not None:
            reply["session"] = await self._held(_number_of(reply), message)

    async def _held(self, interaction: str, message: Mapping[str, Any] | None) -> dict[str, Any]:
        """Has the session hold the response; returns what is said of it."""
        assert self.turn is not None
        session, asked = self.turn
        [taken] = self._taken
        digest = b"" if message is None else answered(asked, message)
        prompt_ids = np.asarray(taken.prompt_ids, np.int32)
        checksum = self._served.engine.checksums.get(taken.spans[-1][0], "") if taken.spans else ""
        recorded = await session.record(interaction, prompt_ids, taken.segment, digest, checksum)
        return {"session_id": session.name, "sequence": recorded.sequence, "forks": recorded.forks}

    async def texts(
        self, first: dict[str, Any] | None, rest: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream as they are sent."""
        told, last, message = Told(), {} if first is None else first, False
        late: list[bytes] = []
        async with aclosing(_all(first, rest)) as events:
            async for last in events:
                for choice in last.get("choices", ()):
                    message = message or "delta" in choice
                    told.add(choice.get("delta") or {})
                text = _event(json.loads(bytes(_refused(last["error"]).body)) if "error" in last else last)
                # A client goes on after it has read the end of a response, which therefore waits for the session.
                if self.turn is not None and (late or _ends(last)):
                    late.append(text)
                else:
                    yield text
        if self.turn is not None and "error" not in last:
            try:
                await self._held(_number_of(last), told.message if message else None)
            except ServiceError as error:
                late = [_event(http_error(error).contents)]
        elif late:
            late = late[-1:]
        for text in late:
            yield text
        yield f"data: {_DONE}\n\n".encode()

    async def close(self) -> None:
        """Ends what is left of its requests."""
        try:
            if self._running is not None:
                await self._running.close()
        finally:
            self._admitted.close()

    @property
    def sampled(self) -> int:
        """Number of tokens that were read."""
        return sum(taken.spans[-1][2] for taken in self._taken if taken.spans)


_CALL: ContextVar[_Call] = ContextVar("call")


def _no_room(longest: int) -> str:
    return (
        f"prompt: leaves no room for a response; should be {longest - 1} tokens at most, as the model takes {longest}"
    )


def _each(params: SamplingParams) -> list[SamplingParams]:
    """Parameters of each of the `n` responses, with the seeds that vLLM gives them."""
    if params.n == 1:
        return [params]
    several = [copy(params) for _ in range(params.n)]
    for place, one in enumerate(several):
        one.n, one.seed = 1, None if params.seed is None else (params.seed + place) % _SEEDS
    return several


def _name_tokens(logprobs: Any) -> None:
    """Adds to log-probs of tokens without texts the names that vLLM has for them elsewhere, which clients of prime-rl
    look for."""
    for entry in (logprobs or {}).get("content") or ():
        if "token_id" in entry:
            entry["token"] = f"token_id:{entry['token_id']}"


async def _all(
    first: dict[str, Any] | None, rest: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(rest):
        if first is not None:
            yield first
            async for event in rest:
                yield event


def _ends(event: Mapping[str, Any]) -> bool:
    """True if an event says that the response has ended."""
    return any(choice.get("finish_reason") for choice in event.get("choices", ()))


def _event(contents: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(contents)}\n\n".encode()


def _number_of(reply: Mapping[str, Any]) -> str:
    """Number of an answer, by which its reward is set."""
    return str(reply.get("id") or reply.get("request_id") or "")
