"""The HTTP door of a replica: what the guard of Serve's proxy let through, answered by an engine's own door."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quartet.security.identity import Caller, caller_of
from quartet.security.session_key import KEY, is_one_of_several, key_of
from quartet.serving.admission import Admission
from quartet.serving.desk import Desk
from quartet.serving.health import healthy
from quartet.serving.http import HeaderMetadata, health, refused, share_of_request
from quartet.serving.share import Share
from quartet.serving.slots import EngineSlots
from quartet.wire.errors import InvalidArgument
from services.rollout.metrics import Line, exposition
from services.rollout.openai_fields import read
from services.rollout.session_holder import OpenSession, SessionStore
from services.rollout.session_terms import terms_of
from services.rollout.session_trajectory import as_json
from services.rollout.sessions import MOST_OF_A_SESSION

if TYPE_CHECKING:  # the replica needs neither before it starts
    from protos import rollout_pb2 as pb
    from services.rollout.interface import Engine


class Completions(Protocol):
    """An engine's answers in OpenAI's protocol and Anthropic's."""

    sampled: int
    """Number of tokens that it has sampled for them."""

    async def answer(self, path: str, body: bytes, share: Share, session: OpenSession | None) -> Response:
        """Answers a request with a body: for a completion, a chat's answer, or tokens.

        Args:
            path: below the route prefix.
            body: the request's.
            share: in whose name its work waits.
            session: the session that holds what is sampled; None for none.

        Raises:
            ServiceError: the request is refused.
        """

    async def models(self) -> Any:
        """The contents of `/v1/models`."""

    async def tokenizer_info(self) -> Any:
        """The contents of `/tokenizer_info`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The parts of a replica that a door needs."""

    engine: "Engine"
    admission: Admission
    slots: EngineSlots
    run: Callable[[], str]
    """Returns the name of the run that holds the replica; empty if none does."""
    beat: Callable[[], None]
    """Raises Unavailable if the engine stands still."""
    check: Callable[["pb.GenerateRequest"], None]
    """Raises unless the lease of a request holds the replica, which serves one of its versions."""
    proved: Callable[[], "pb.Proof | None"]
    """Returns the last proof of the run's pushes; None before one."""


class Door:
    """Answers the requests of one replica."""

    def __init__(
        self,
        completions: Completions,
        check_health: Callable[[], Awaitable[None]],
        sessions: SessionStore,
        replicas: Callable[[], Awaitable[Sequence[Sequence[Line]]]],
        desk: Desk,
    ) -> None:
        """
        Args:
            completions: the engine's.
            check_health: raises if the replica is ill.
            sessions: those of the application.
            replicas: returns the metrics of all replicas, each named by a label.
            desk: where the tokens of sessions are written out.
        """
        self._completions, self._check_health, self._sessions = completions, check_health, sessions
        self._replicas, self._desk = replicas, desk
        self._answered = Counter[tuple[str, int]]()
        """Path and status -> number of answers."""

    @property
    def lines(self) -> list[Line]:
        """Metrics of this replica's door."""
        answered = [
            ("http_requests_total", {"path": path, "status": str(status)}, number)
            for (path, status), number in self._answered.items()
        ]
        return [*answered, ("http_sampled_tokens_total", {}, self._completions.sampled)]

    async def answer(self, request: Request) -> Response:
        """Answers a request. An error is an answer too, in the form that OpenAI's clients read."""
        path = str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))
        answer = await self._answer(path, request)
        self._answered[path, answer.status_code] += 1
        return answer

    async def _answer(self, path: str, request: Request) -> Response:
        try:
            if path == "/health":
                return health(await healthy(self._check_health))
            if path == "/metrics":
                return exposition(await self._replicas(), await self._sessions.counts())
            if path == "/v1/models":
                return JSONResponse(await self._completions.models())
            if path == "/tokenizer_info":
                return JSONResponse(await self._completions.tokenizer_info())
            caller, body = caller_of(HeaderMetadata(request)), await request.body()
            if path.startswith("/rl/"):
                return await self._of_session(path, read(body, path), caller, request)
            session = OpenSession(self._sessions, caller.name, caller.session) if caller.session else None
            return await self._completions.answer(path, body, share_of_request(request), session)
        except Exception as error:
            return refused(error, path)

    async def _of_session(self, path: str, given: dict[str, Any], caller: Caller, request: Request) -> Response:
        """The answer to a request about a session, or about several."""
        if path == "/rl/start_session" and "sessions" in given:
            return await self._started(given, caller, request)
        if "session_ids" in given or "remove_ids" in given:
            ids = given.get("session_ids", ()), given.get("remove_ids", ())
            return await self._written(request, "trajectories", caller.name, *ids)
        name = given.get("session_id", caller.session)
        if not name or not isinstance(name, str):
            raise InvalidArgument(
                "X-Session-ID: missing; send the number that /rl/start_session has answered, or the session's key as "
                "the token"
            )
        ask, who = self._sessions.ask, (caller.name, name)
        if path == "/rl/trajectory" and not given.get("remove"):
            return await self._written(request, "trajectory", *who)
        told: dict[str, Any] = {"session_id": name}
        if path == "/rl/start_session":
            terms = terms_of(given, caller)
            await ask("start", *who, self._sessions.tokenizer, given.get("task_id", ""), terms)
            told |= {"api_key": request.headers.get(KEY), "model": await self._model()}
        elif path == "/rl/set_reward":
            if "reward" not in given:
                raise InvalidArgument("reward: missing; should be a number")
            await ask("set_reward", *who, float(given["reward"]), given.get("interaction_id", ""))
        elif path == "/rl/end_session":
            told["interaction_count"] = await ask("end", *who)
        else:
            await ask("remove", *who)
            told["removed"] = True
        return JSONResponse(told)

    async def _model(self) -> str:
        return str((await self._completions.models())["data"][0]["id"])

    async def _started(self, given: dict[str, Any], caller: Caller, request: Request) -> Response:
        """The answer to a request that starts several sessions."""
        if is_one_of_several(caller.session):
            raise InvalidArgument("X-Session-ID: is that of one session; leave it out, or send that of several")
        of_all, tokenizer = terms_of(given, caller), self._sessions.tokenizer
        named = [key_of(request.headers[KEY], place) for place in range(len(given["sessions"]))]
        sessions = [
            (name, each.get("task_id", ""), of_all | ({"seed": each["seed"]} if "seed" in each else {}))
            for (name, _), each in zip(named, given["sessions"], strict=True)
        ]
        await self._sessions.ask("start_all", caller.name, tokenizer, sessions)
        told = [{"session_id": name, "api_key": key} for name, key in named]
        return JSONResponse({"sessions": told, "model": await self._model()})

    async def _written(self, request: Request, method: str, *asked: Any) -> Response:
        """An answer of the sessions that may have a million tokens: written one at a time, callers taking turns."""
        async with self._desk.turn(share_of_request(request), MOST_OF_A_SESSION):
            told = await self._sessions.ask(method, *asked)
            text = await asyncio.to_thread(as_json, {"trajectories": told} if isinstance(told, list) else told)
        return Response(text, media_type="application/json")
