"""The guard of Serve's HTTP port, an ASGI middleware that checks every request before Serve sees it."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.types import Message, Receive, Scope, Send

from quartet.seams.serve import route_of
from quartet.security.authentication import AUTHORIZATION, bearer_token
from quartet.security.gate import Gate
from quartet.security.http_routes import ROUTES, STARTS_SESSION, http_route, scorer_in
from quartet.security.identity import Caller
from quartet.security.port import on_loopback
from quartet.security.session_key import KEY, SESSION, SessionKeys, new_session
from quartet.serving.door.connections import Connections, spelled
from quartet.serving.door.http_server import LARGEST_HEADERS
from quartet.serving.door.log_lines import Refusals
from quartet.serving.door.open_calls import OpenCalls
from quartet.serving.door.to_replica import ToReplica
from quartet.serving.in_turn import InTurn
from quartet.wire.callers import PURPOSE, RUN
from quartet.wire.errors import PermissionDenied, ServiceError, Unauthenticated, Unavailable
from quartet.wire.http_errors import HttpError, http_error
from quartet.wire.json_bounds import check_bounds

log = logging.getLogger("quartet")
_NAMED = "x-session-id"
"""Header with which a caller names one of its sessions. Numbers of other forms are not sessions of ours: clients send
them for other servers' routing."""
_PASSED_ON = frozenset({b"content-type", PURPOSE.encode(), RUN.encode()})
"""Headers that go on to the replica. Others would steer Serve's routing and deadlines, or enter its logs."""
_SINGLE = frozenset({"host", "authorization", "content-type", "content-length", "content-encoding"})
_TOKEN_ADVICE = (
    "send `Authorization: Bearer` with a token that the policy names; `quartet up` writes yours to "
    ".quartet/access/token"
)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::[0-9]{1,5})?")
"""A name or an address, and a port."""
_DISCARDED, _DISCARD_S = 4 << 20, 1.0
"""Most bytes of a refused request's body that are read and thrown away, and the longest wait for them."""
_COUNTED = 4 << 10
"""Most bytes of a body that has not arrived whole which do not count for its caller yet."""
_LOST = HttpError(503, "no replica could answer, or the one that answered has died; ask again", retry_after_s=1)


class _Refused(Exception):
    """A request that is refused."""

    def __init__(self, answer: HttpError) -> None:
        super().__init__(answer.message)
        self.answer = answer


class _GivenUp(Exception):
    """A caller does not read its answer."""


class _Asked(NamedTuple):
    """A request whose caller may make it."""

    caller: Caller
    method: str
    route: str
    """Name of its route, as the gate knows it."""
    peer: str
    key: str
    """Key of the session that it starts; empty for others."""


class HttpGuard:
    """Authenticates, authorizes, routes and limits requests; a failure is answered with a named error.

    Nothing of a stranger's body is kept. Browsers are strangers: pages of other sites that they show would use this
    machine's rights.
    """

    def __init__(self, app: Any, gate: Gate, connections: Connections, calls: OpenCalls) -> None:
        """
        Args:
            app: Serve's.
            gate: says who may call what.
            connections: those of this port.
            calls: those that are open at the ports of this process.
        """
        self._find, self._replicas = route_of(app), ToReplica(app)
        self._gate, self._connections, self._open = gate, connections, calls
        self._refusals, self._keys, self._checking = Refusals(), SessionKeys(), InTurn()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; leaves what is not one, such as a WebSocket."""
        if scope["type"] != "http":
            return
        reply, incoming = _Reply(send, self._gate.limits.unread_s), _Incoming(receive)
        with suppress(_GivenUp), ExitStack() as held:
            try:
                headers = _read(scope)
                asked = self._admitted(scope, headers, held)
                body = await self._received(asked, headers, incoming, held)
            except (_Refused, ServiceError) as error:
                await incoming.discard(scope)
                await reply.refuse(error.answer if isinstance(error, _Refused) else http_error(error))
                return
            try:
                await self._replicas.answer(_scope(scope, asked), body, receive, reply.send)
            except _GivenUp:
                self._connections.close(asked.peer)
                raise
            except Unavailable as error:
                await reply.refuse(http_error(error))
            except Exception as error:
                log.error("%s failed in the proxy", asked.route, exc_info=error)
            await reply.end()

    def _admitted(self, scope: Scope, headers: Mapping[str, str], held: ExitStack) -> _Asked:
        """The request's caller and route."""
        method, path, peer = scope["method"], scope["path"], spelled(*(scope["client"] or ("", 0)))
        _check_not_a_browser(headers)
        prefix, application, deployment = self._find(path) or ("", None, "")
        below = path.removeprefix(prefix if prefix != "/" else "")
        if deployment == "Reward":
            _, below = scorer_in(below)
        route, served = http_route(deployment, below[:64]), ROUTES.get(deployment, {})
        known = f"below {prefix} are {', '.join(served)}" if served else "no application that has it is served here"
        not_here = _Refused(HttpError(404, f"{path[:128]!r} is not here; {known}"))
        try:
            caller = self._caller(headers, route, application)
        except Unauthenticated as error:
            self._refusals.note(route, peer, str(error))
            raise _Refused(HttpError(401, f"{str(error).partition(';')[0]}; {_TOKEN_ADVICE}")) from None
        except PermissionDenied as error:
            self._refusals.note(route, peer, str(error))
            if below not in served:
                raise not_here from None
            raise
        self._connections.prove(peer)
        if below not in served:
            raise not_here
        if served[below].method != method:
            raise _Refused(HttpError(405, f"{below} takes {served[below].method}"))
        held.callback(self._open.begin(caller), None)
        key = self._keys.make(caller.name, caller.session) if route == STARTS_SESSION else ""
        return _Asked(caller, method, route, peer, key)

    def _caller(self, headers: Mapping[str, str], route: str, application: str | None) -> Caller:
        """The caller, and the session that its request belongs to. Raises as Gate.admit."""
        proof = ((AUTHORIZATION, headers.get(AUTHORIZATION, "")),)
        if holder := self._keys.read(bearer_token(proof) or ""):
            return self._gate.admit_holder(*holder, route, application)
        caller = self._gate.admit(route, application, {}, proof)
        named = headers.get(_NAMED, "")
        if SESSION.fullmatch(named):
            return replace(caller, session=named)
        return replace(caller, session=new_session()) if route == STARTS_SESSION else caller

    async def _received(self, asked: _Asked, headers: Mapping[str, str], receive: Receive, held: ExitStack) -> bytes:
        """The request's body, within its bounds."""
        if asked.method == "GET":
            return b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise _Refused(HttpError(415, f"content-type: {kind[:64]!r}; must be application/json"))
        if headers.get("content-encoding", "identity") != "identity":
            raise _Refused(HttpError(415, "content-encoding: send the body as it is, uncompressed"))
        largest = self._gate.limits.of(asked.route)
        if int(headers.get("content-length", "0")) > largest:
            raise _Refused(_too_large(largest))
        seconds = self._gate.limits.request_s
        try:
            async with asyncio.timeout(seconds):
                hold = self._open.hold
                body = await _whole(receive, largest, lambda size: held.callback(hold(asked.caller, size), None))
        except TimeoutError:
            raise _Refused(HttpError(408, f"no whole body arrived within {seconds:g} s; send it at once")) from None
        await self._checking.do(partial(check_bounds, body), len(body))
        return body


def _read(scope: Scope) -> dict[str, str]:
    """The request's headers, of which those that decide anything may come once only."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) > LARGEST_HEADERS:
        raise _Refused(HttpError(431, f"the headers have more than {LARGEST_HEADERS} bytes"))
    headers: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        if name in headers and name in _SINGLE:
            raise _Refused(HttpError(400, f"{name}: more than one such header"))
        headers[name] = value.decode("latin-1")
    return headers


def _check_not_a_browser(headers: Mapping[str, str]) -> None:
    """Refuses what pages of other sites can make a browser send, also under a name that leads to this machine."""
    if "origin" in headers:
        raise _Refused(HttpError(403, "requests of web pages (header `origin`) are not answered"))
    host = headers.get("host", "")
    parts = _HOST.fullmatch(host.lower())
    if not (parts and on_loopback(parts[1])):
        raise _Refused(HttpError(403, f"host: {host[:64]!r}; must be 127.0.0.1 or localhost"))


def _too_large(largest: int) -> HttpError:
    return HttpError(413, f"the body has more than {largest} bytes; split it")


async def _whole(receive: Receive, largest: int, count: Callable[[int], object]) -> bytes:
    """The body of a request, in as many pieces as it comes. `count` is told how many bytes have arrived, in few
    steps."""
    body, counted = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _Refused(HttpError(400, "the body broke off"))
        body += message.get("body", b"")
        if len(body) > largest:
            raise _Refused(_too_large(largest))
        whole = not message.get("more_body", False)
        if whole or len(body) - counted >= _COUNTED:
            count(len(body) - counted)
            counted = len(body)
        if whole:
            return bytes(body)


class _Incoming:
    """The body of a request, in pieces."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._ended = receive, False

    async def __call__(self) -> Message:
        """The next piece, or that the caller has left."""
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message

    async def discard(self, scope: Scope) -> None:
        """Throws away the rest of a body that is refused: a connection that is closed with bytes unread is
        reset, and its caller might never read why."""
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if self._ended or b"expect" in headers or not length.isdigit() or int(length) > _DISCARDED:
            return
        left = _DISCARDED
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while not self._ended and left > 0:
                    left -= len((await self()).get("body", b""))


def _scope(scope: Scope, asked: _Asked) -> Scope:
    """The request as Serve gets it, with the caller's identity in place of any that it sent."""
    kept = [(name, value) for name, value in scope["headers"] if name.lower() in _PASSED_ON]
    ours = dict(asked.caller.metadata) | ({KEY: asked.key} if asked.key else {})
    added = [(key.encode(), value.encode()) for key, value in ours.items()]
    return {**scope, "headers": [*kept, *added], "query_string": b""}


class _Reply:
    """The answer to one request, in which errors of libraries are replaced: they hold addresses, paths and traces."""

    def __init__(self, send: Send, unread_s: float) -> None:
        """
        Args:
            send: uvicorn's, which waits while the caller does not read.
            unread_s: longest wait, in seconds; the caller is then given up.
        """
        self._to_caller, self._unread_s = send, unread_s
        self._started = self._over = self._hidden = self._events = False

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._unread_s):
                await self._to_caller(message)
        except TimeoutError:
            raise _GivenUp from None

    async def send(self, message: Message) -> None:
        """Passes on a message; drops those of an error that is not JSON, in whose place `end` answers."""
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"").partition(b";")[0]
            self._events = kind == b"text/event-stream"
            self._hidden = message["status"] >= 400 and kind != b"application/json"
            self._started = not self._hidden
        elif message["type"] == "http.response.body" and not self._hidden:
            self._over = not message.get("more_body", False)
        if not self._hidden:
            await self._send(message)

    async def refuse(self, answer: HttpError) -> None:
        """Sends an answer that is an error."""
        self._started = self._over = True
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        headers.append((b"content-length", str(len(answer.body)).encode()))
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer.body})

    async def end(self) -> None:
        """Ends an answer that broke off, so that the caller knows why."""
        if not self._started:
            await self.refuse(_LOST)
        elif not self._over and self._events:
            self._over = True
            await self._send({"type": "http.response.body", "body": b"data: " + _LOST.body + b"\n\n"})
