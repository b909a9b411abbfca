"""Client of the rollout service's sessions, over HTTP."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import httpx

from quartet.security.port import on_loopback
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.errors import InvalidArgument, InvalidReply, NotFound, ServiceError, Unavailable
from quartet.wire.together import Together

ATTEMPT_S = 30.0
"""Longest wait for one answer, in seconds. That of the tokens of long conversations takes some."""
REMOVAL_S = 5.0
"""Longest time for the removal of the last sessions, which otherwise are dropped by themselves."""
MOST_AT_ONCE = 256
"""Most sessions that one request starts, asks for or removes."""
_MAY_PASS = frozenset({408, 429, 500, 502, 503, 504})
_SAID = 500
"""Most characters of an error that are repeated."""


class Session(NamedTuple):
    """A session, the key that is good for it alone, and the name of the model."""

    session_id: str
    api_key: str
    model: str


class _Wanted(NamedTuple):
    """A session to be started."""

    of_all: str
    """Terms that others may have too, as JSON."""
    own: Mapping[str, Any]


class SessionClient:
    """Starts sessions, reads their tokens and removes them, those that are asked for at the same time by one request.
    An async context manager."""

    def __init__(
        self,
        address: str,
        token: str | None,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Args:
            address: of the application, such as http://127.0.0.1:18000/rollout.
            token: the caller's; None without one.
            timeout_s: longest time for a request, repeated while the service is busy or has no replica.
            transport: httpx's own by default.
        """
        self.address, self._timeout_s = address, timeout_s
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # A proxy is for other machines.
        trusted = not on_loopback(str(httpx.URL(address).host))
        self._http = httpx.AsyncClient(headers=headers, trust_env=trusted, transport=transport)
        self._start, self._tell = Together(self._started, MOST_AT_ONCE), Together(self._told, MOST_AT_ONCE)
        self._over: list[str] = []
        """Sessions that are to be removed."""
        self._removal: asyncio.Task[None] | None = None
        """Removes them; None before the first that is removed at once."""

    async def start(self, of_all: Mapping[str, Any], **own: Any) -> Session:
        """Starts a session on these terms (services/rollout/session_terms.py), of which `own` are this one's: `seed`
        and `task_id`.

        Raises:
            InvalidArgument: a term is refused.
            Unavailable: none was started in time; the message says what was answered last.
        """
        return await self._start(_Wanted(json.dumps(dict(of_all), sort_keys=True), own))

    async def trajectory(self, session: Session) -> dict[str, Any]:
        """The session's tokens, as docs/openai.md describes them. Raises as `start`; NotFound if they are lost."""
        told = await self._tell(session.session_id)
        if "error" in told:
            raise NotFound(str(told["error"]))
        return told

    def remove(self, session: Session, *, at_once: bool = False) -> None:
        """Has the session removed, with a later request, or `at_once` where something may still use it. Does not
        wait for it."""
        self._over.append(session.session_id)
        if at_once and (self._removal is None or self._removal.done()):
            self._removal = asyncio.create_task(self._remove())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Removes what is left to be removed, and closes the connections."""
        if self._removal is not None:
            self._removal.cancel()
            await asyncio.wait([self._removal])
        await self._remove()
        await self._http.aclose()

    async def _remove(self) -> None:
        """Removes those that are to be removed, unless the service does not do it: they are then left for a later
        request."""
        with suppress(ServiceError):
            while self._over:
                await self._trajectories([], REMOVAL_S)

    async def _started(self, wanted: Sequence[_Wanted]) -> list[Session]:
        """The sessions, by a request for those with the same terms."""
        made: dict[int, Session] = {}
        for of_all in dict.fromkeys(each.of_all for each in wanted):
            places = [place for place, each in enumerate(wanted) if each.of_all == of_all]
            asked = {**json.loads(of_all), "sessions": [wanted[place].own for place in places]}
            told = await self._ask("/rl/start_session", asked, self._timeout_s)
            try:
                for place, each in zip(places, told["sessions"], strict=True):
                    made[place] = Session(str(each["session_id"]), str(each["api_key"]), str(told["model"]))
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidReply(f"/rl/start_session: an answer that cannot be read: {error!r}") from None
        return [made[place] for place in range(len(wanted))]

    async def _told(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """The trajectories of the sessions, which the service may tell in several parts."""
        told: list[dict[str, Any]] = []
        while left := names[len(told) :]:
            reply = await self._trajectories(left, self._timeout_s)
            part = reply.get("trajectories")
            if not (isinstance(part, list) and 0 < len(part) <= len(left)):
                raise InvalidReply(f"/rl/trajectory: should tell of 1 to {len(left)} sessions")
            told += part
        return told

    async def _trajectories(self, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """The answer to a request for the tokens of sessions, which removes others besides."""
        over, self._over = self._over[:MOST_AT_ONCE], self._over[MOST_AT_ONCE:]
        try:
            return await self._ask("/rl/trajectory", {"session_ids": names, "remove_ids": over}, timeout_s)
        except BaseException:
            self._over += over  # which may not have been removed
            raise

    async def _ask(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        backoff = Backoff(Deadline(timeout_s))
        while True:
            try:
                reply = await self._http.post(self.address + path, json=dict(body), timeout=min(ATTEMPT_S, timeout_s))
            except httpx.HTTPError as error:
                await backoff.wait(Unavailable(f"{path}: {type(error).__name__}: {error}"))
                continue
            if reply.status_code == httpx.codes.OK:
                return await asyncio.to_thread(_object, reply, path)  # of millions of tokens it takes a while
            said = f"{path}: {reply.status_code}: {reply.text[:_SAID]}"
            if reply.status_code == httpx.codes.NOT_FOUND:
                raise NotFound(said)
            if reply.status_code not in _MAY_PASS:
                raise InvalidArgument(said)
            await backoff.wait(Unavailable(said))


def _object(reply: httpx.Response, path: str) -> dict[str, Any]:
    try:
        told = reply.json()
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise InvalidReply(f"{path}: the answer should be a JSON object, got {reply.text[:80]!r}")
    return told
