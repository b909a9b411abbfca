"""One call of OpenAI's protocol: its requests in vLLM's engine, and what answers say of tokens and versions."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from copy import copy
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
from starlette.responses import Response
from vllm import SamplingParams
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind

from quartet.serving.http import refusal
from quartet.serving.share import Share
from quartet.serving.slots import Running
from quartet.trajectory import Segment, VersionSpans
from quartet.wire.errors import InvalidArgument, ServiceError, Unavailable
from quartet.wire.http_errors import HttpError, http_error
from quartet.wire.json_object import whole_characters
from services.rollout.histories import Told, answered
from services.rollout.http import Served
from services.rollout.interface import check_least
from services.rollout.openai_fields import TOKEN_FIELDS
from services.rollout.session_holder import OpenSession
from services.rollout.vllm.requests import Requests
from services.rollout.vllm.scheduler import AT_ONCE_KEY, STREAMED_KEY

STILL_S = 2.0
"""Seconds without an output after which it is asked whether the engine still answers."""
MOST_LISTED = 1 << 17
"""Most log-probs that an answer may list. Each takes time of the process that serves all callers of the replica, and
about 1 KB until the answer is sent."""
DONE = "[DONE]"
"""The last event of a stream."""
_SEEDS = 1 << 63
"""Number of seeds; the engine would die of a larger one."""


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
    finish_reason: str = ""
    """Reason for which it ended; empty until then."""

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
        self.finish_reason = response.finish_reason or ""
        self.logprobs += [
            entry[token].logprob for token, entry in zip(response.token_ids, response.logprobs, strict=True)
        ]

    @property
    def segment(self) -> Segment:
        """The tokens that were kept."""
        return Segment(np.asarray(self.ids, np.int32), np.asarray(self.logprobs, np.float32), self.spans)


class Turn(NamedTuple):
    """A response that a session is to hold."""

    session: OpenSession
    number: int
    """Number of the request among the session's requests."""
    asked: bytes
    """Digest of the request's messages; empty if it has none."""


class OpenAICall:
    """One call: its requests in the engine, and the versions of what they have sampled."""

    def __init__(
        self,
        served: Served,
        requests: Requests,
        share: Share,
        versions: tuple[int, int] | None,
        longest: int,
        turn: Turn | None,
        *,
        bounded: bool,
    ) -> None:
        """
        Args:
            served, requests: the replica and its engine.
            share: in whose name its work waits.
            versions: the oldest and the newest version that may sample its tokens; None for any.
            longest: most tokens of a prompt and its response.
            turn: the turn of a session that it is.
            bounded: the versions are those of its session's terms, and not the one that `model` names.
        """
        self._served, self._requests, self.share, self._versions = served, requests, share, versions
        self._bounded = bounded
        self._longest, self.turn = longest, turn
        self._taken: list[_Taken] = []
        self._newest: int | None = None
        """Version of the newest token that was read."""
        self._running: Running[None] | None = None
        self._admitted = ExitStack()
        self._refused: ServiceError | None = None
        self.size = 0
        """Most tokens and listed log-probs of its answer."""
        self.keeps = turn is not None
        """True to keep what is sampled, with its log-probs."""
        self.recorded = False
        """True if its session holds the response."""
        self.full = False
        """True if it is refused as its prompt leaves no room for a response."""
        self.leave_desk: Callable[[], None] = lambda: None
        """Called when its prompts are tokens."""

    def take(self, prompt_ids: Sequence[int], params: SamplingParams, salt: str) -> AsyncGenerator[Any, None]:
        """Takes one of the call's prompts and returns the outputs of its responses, as vLLM's own engine would. All
        are queued together when the first of them is asked for an output.

        Raises:
            InvalidArgument: the engine could not carry it out.
        """
        self._check(prompt_ids, params)
        room = self._longest - len(prompt_ids)
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.leave_desk()
        if self.keeps and params.logprobs is None:
            params.logprobs = 0
            if params.output_kind is not RequestOutputKind.DELTA:
                # Nobody asked for log-probs, and so nobody could tell why there are too many to list.
                params.max_tokens = min(params.max_tokens, MOST_LISTED // (params.n or 1))
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
        self.check_room(len(prompt_ids))
        if max(prompt_ids) >= engine.vocab_size:
            raise InvalidArgument(f"prompt: {max(prompt_ids)} is outside the vocabulary of {engine.vocab_size}")
        for token in params.stop_token_ids or ():
            if not 0 <= token < engine.vocab_size:
                raise InvalidArgument(f"stop_token_ids: {token} is outside the vocabulary of {engine.vocab_size}")
        check_least(params.min_tokens, engine, "min_tokens")

    def check_room(self, tokens: int) -> None:
        """Raises InvalidArgument if a prompt of so many tokens leaves no room for a response."""
        if tokens >= self._longest:
            self.full = True
            raise InvalidArgument(no_room(self._longest))

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
            taken.outputs.put_nowait((taken.place, _unavailable(error)))
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
                    raise _unavailable(error) from None
                continue
            if come is None:
                left -= 1
                continue
            if isinstance(come, Exception):
                raise come
            taken = several[place]
            output, taken.spans = come
            if self._versions is not None:
                oldest, newest = self._versions
                if any(not oldest <= version <= newest for version, *_ in taken.spans):
                    # A push came while it waited or ran.
                    served = f"served is {taken.spans[-1][0]}"
                    if self._bounded:
                        told = f"max_version: the session takes {oldest} to {newest}, and {served}"
                    else:
                        told = f"model: version {newest} is not served any more; {served}"
                        told += "; ask for the newest without a version"
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
            _write_characters(choice.get("message") or {})
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
        session, _, asked = self.turn
        [taken] = self._taken
        digest = b"" if message is None else answered(asked, message)
        prompt_ids = np.asarray(taken.prompt_ids, np.int32)
        checksum = self._served.engine.checksums.get(taken.spans[-1][0], "") if taken.spans else ""
        recorded = await session.record(interaction, prompt_ids, taken.segment, digest, checksum, taken.finish_reason)
        self.recorded = True
        return {"session_id": session.name, "sequence": recorded.sequence, "forks": recorded.forks}

    async def texts(
        self, event: dict[str, Any] | None, rest: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream as they are sent: the first, if there is one, and the rest."""
        told, message = Told(), False
        last: dict[str, Any] = {}
        late: list[Mapping[str, Any]] = []
        async with aclosing(rest):
            while event is not None:
                last = event
                for choice in last.get("choices", ()):
                    message = message or "delta" in choice
                    told.add(choice.get("delta") or {})
                said = json.loads(bytes(refused(last["error"]).body)) if "error" in last else last
                # A client goes on after it has read the end of a response, which therefore waits for the session.
                if self.turn is not None and (late or _ends(last)):
                    late.append(said)
                else:
                    yield _event(said)
                event = await anext(rest, None)
        if self.turn is not None and "error" not in last:
            try:
                held = await self._held(_number_of(last), told.message if message else None)
                late = [{**event, "session": held} for event in late]
            except ServiceError as error:
                late = [http_error(error).contents]
        elif late:
            late = late[-1:]
        for said in late:
            yield _event(said)
        yield f"data: {DONE}\n\n".encode()

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


def refused(error: dict[str, Any]) -> Response:
    """The answer for an error of vLLM's. The text of one that is not the request's fault stays in the log."""
    status, message = int(error["code"]), str(error["message"])
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return refusal(HttpError(status, message[:1000], error.get("param")))
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return refusal(http_error(Unavailable(message[:1000])))
    return refusal(HttpError(status, "the engine failed; see the replica's log"))


def no_room(longest: int) -> str:
    return (
        f"prompt: leaves no room for a response; should be {longest - 1} tokens at most, as the model takes {longest}"
    )


def _unavailable(error: ServiceError) -> GracefulHTTPError:
    return GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


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


def _write_characters(message: dict[str, Any]) -> None:
    """Replaces halves of characters in a whole answer's calls, with which no answer can be sent. A stream sends the
    escapes by which a model wrote them, and a request may give these back."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        function |= {name: whole_characters(function[name]) for name in ("name", "arguments")}


def _ends(event: Mapping[str, Any]) -> bool:
    """True if an event says that the response has ended."""
    return any(choice.get("finish_reason") for choice in event.get("choices", ()))


def _event(contents: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(contents)}\n\n".encode()


def _number_of(reply: Mapping[str, Any]) -> str:
    """Number of an answer, by which its reward is set."""
    return str(reply.get("id") or reply.get("request_id") or "")
