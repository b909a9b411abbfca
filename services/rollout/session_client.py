"""Client of the rollout service's sessions, over HTTP."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import httpx

from quartet.security.port import on_loopback
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.errors import InvalidArgument, InvalidReply, NotFound, Unavailable

ATTEMPT_S = 30.0
"""Longest wait for one answer, in seconds. That of the tokens of a long conversation takes some."""
REMOVAL_S = 5.0
"""Longest time for the removal of a session, which otherwise is dropped by itself."""
_MAY_PASS = frozenset({408, 429, 500, 502, 503, 504})
_SAID = 500
"""Most characters of an error that are repeated."""


class Session(NamedTuple):
    """A session, the key that is good for it alone, and the name of the model."""

    session_id: str
    api_key: str
    model: str


class SessionClient:
    """Starts sessions, reads their tokens and removes them. An async context manager."""

    def __init__(self, address: str, token: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """
        Args:
            address: of the application, such as http://127.0.0.1:18000/rollout.
            token: the caller's; None without one.
            transport: httpx's own by default.
        """
        self.address = address
        headers = {"authorization": f"Bearer {token}"} if token else {}
        limits = httpx.Limits(max_connections=64, keepalive_expiry=30)
        # A proxy is for other machines.
        trusted = not on_loopback(str(httpx.URL(address).host))
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=ATTEMPT_S, trust_env=trusted, transport=transport
        )

    async def start(self, terms: Mapping[str, Any], timeout_s: float) -> Session:
        """Starts a session on `terms` (services/rollout/session_terms.py), asking again while the service is busy or
        none of its replicas is there.

        Raises:
            InvalidArgument: a term is refused.
            Unavailable: none was started in time; the message says what was answered last.
        """
        told = await self._ask("/rl/start_session", terms, timeout_s)
        try:
            return Session(*(str(told[name]) for name in Session._fields))
        except KeyError as error:
            raise InvalidReply(f"/rl/start_session: an answer without {error}") from None

    async def trajectory(self, session: Session, timeout_s: float) -> dict[str, Any]:
        """The session's tokens, as docs/openai.md describes them. Raises as `start`; NotFound if they are lost."""
        return await self._ask("/rl/trajectory", {"session_id": session.session_id}, timeout_s)

    async def remove(self, session: Session) -> None:
        """Removes the session. Raises as `trajectory`."""
        await self._ask("/rl/trajectory", {"session_id": session.session_id, "remove": True}, REMOVAL_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def _ask(self, path: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        backoff = Backoff(Deadline(timeout_s))
        while True:
            try:
                reply = await self._http.post(self.address + path, json=dict(body))
            except httpx.HTTPError as error:
                await backoff.wait(Unavailable(f"{path}: {type(error).__name__}: {error}"))
                continue
            said = f"{path}: {reply.status_code}: {reply.text[:_SAID]}"
            if reply.status_code == httpx.codes.OK:
                return _object(reply, path)
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
