"""Serve's own HTTP server in this process, opened as Quartet opens it, with a recording app in place of Serve's."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.exceptions import RayActorError
from ray.serve._private import default_impl, http_util
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response

from orchestrator.deployment.listeners import free_ports
from quartet.security.port import Port
from quartet.serving.http import HttpMixin
from quartet.serving.proxy import bind_to_host
from tests.unit.front_door import APPLICATIONS

Send = Callable[[Any], Awaitable[None]]


async def fine(send: Send) -> None:
    """Answers as a replica does."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


class Replicas:
    """Stands where Serve would send a request to a replica, as its proxy and as a handle of each deployment."""

    def __init__(self) -> None:
        self.proxy_router = ProxyRouter(lambda deployment, _: _Handle(deployment, self))
        self.answer: Callable[[Send], Coroutine[Any, Any, None]] = fine
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        """Path, headers and body of each request that got here."""
        self.by_reference: list[bool] = []
        """True for each request that was sent as an object of Ray's and not over gRPC."""
        self.left = asyncio.Event()
        """Set when a caller has left."""
        self.door: Callable[[Request], Awaitable[Response]] | None = None
        """Answers in the place of all this, as a replica's door."""
        self.there = asyncio.Event()
        """Set while a replica is there to take requests."""
        self.there.set()
        self.under_way = 0
        """Number of requests, as the proxy counts them."""

    def _ongoing_requests_start(self) -> None:
        self.under_way += 1

    def _ongoing_requests_end(self) -> None:
        self.under_way -= 1

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Serve's own way to a replica, which nothing takes."""
        raise NotImplementedError


@dataclass
class _Handle:
    deployment_id: DeploymentID
    replicas: Replicas
    by_reference: bool = True

    def options(self, method_name: str, stream: bool, _by_reference: bool, **_: Any) -> "_Handle":
        assert (method_name, stream) == (HttpMixin.http.__name__, True)
        return _Handle(self.deployment_id, self.replicas, _by_reference)

    def remote(self, *given: Any) -> "_Parts":
        self.replicas.by_reference.append(self.by_reference)
        door = self.replicas.door
        replica: Any = SimpleNamespace(answer=door)
        parts = HttpMixin.http(replica, *given) if door else self._answer(*given)
        return _Parts(parts, self.replicas.there)

    async def _answer(self, _prefix: str, path: str, body: bytes, _method: str, headers: Any) -> AsyncGenerator[Any]:
        """The answer of the test, by messages of ASGI."""
        self.replicas.seen.append((path, dict(headers), body))
        parts: asyncio.Queue[Any] = asyncio.Queue(1)
        whole = False

        async def send(message: Any) -> None:
            nonlocal whole
            whole = message["type"] == "http.response.body" and not message.get("more_body")
            start = message["type"] == "http.response.start"
            await parts.put((message["status"], message["headers"], b"") if start else message["body"])

        async def answer() -> None:
            try:
                await self.replicas.answer(send)
            except asyncio.CancelledError:
                self.replicas.left.set()
                raise
            finally:
                await parts.put(None)

        answering = asyncio.create_task(answer())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await answering
            if not whole:
                raise RayActorError(error_msg="the replica has died")
        finally:
            answering.cancel()


class _Parts:
    """The parts of an answer, as a call of a handle gives them."""

    def __init__(self, parts: AsyncGenerator[Any], there: asyncio.Event) -> None:
        self._parts, self._there = parts, there

    async def _fetch_future_result_async(self) -> None:
        await self._there.wait()

    def __aiter__(self) -> AsyncGenerator[Any]:
        return self._parts

    def cancel(self) -> None:
        """Ends the replica's part."""
        self._ending = asyncio.ensure_future(self._parts.aclose())


@asynccontextmanager
async def http_door(
    port: Port,
    applications: Mapping[str, str] = APPLICATIONS,
    host: str = "127.0.0.1",
    prefix: str = "/{}",
) -> AsyncIterator[tuple[int, Replicas]]:
    """The number of a port that Serve's own function opens, and the replicas behind it. `prefix` is the route prefix
    of an application, given its name."""
    replicas, [number] = Replicas(), free_ports(1)
    served = {DeploymentID(deployment, name): prefix.format(name) for name, deployment in applications.items()}
    replicas.proxy_router.update_routes({deployment: EndpointInfo(where) for deployment, where in served.items()})
    kept = [(module, name, getattr(module, name)) for module, name in _REPLACED]
    try:
        with patch.dict(os.environ, port.environment):
            options = HTTPOptions(host=host, port=number)
            options.middlewares.extend(bind_to_host())
        loop = asyncio.get_running_loop()
        running, server = await http_util.start_asgi_http_server(replicas, options, event_loop=loop)
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        try:
            yield number, replicas
        finally:
            server.should_exit = server.force_exit = True
            await running
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


_REPLACED: tuple[tuple[Any, str], ...] = ((default_impl, "add_grpc_address"), (http_util, "uvicorn"))
