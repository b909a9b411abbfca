"""Serve's own HTTP server in this process, opened as Quartet opens it, with a recording app in place of Serve's."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.serve._private import default_impl, http_util
from ray.serve._private.common import DeploymentID, EndpointInfo
from ray.serve._private.proxy_router import ProxyRouter
from ray.serve.config import HTTPOptions

from orchestrator.deployment.listeners import free_ports
from quartet.security.port import Port
from quartet.serving.proxy import bind_to_host
from tests.unit.front_door import APPLICATIONS

Send = Callable[[Any], Awaitable[None]]


async def fine(send: Send) -> None:
    """Answers as a replica does."""
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


@dataclass
class Replicas:
    """Stands where Serve's proxy would send a request to a replica."""

    proxy_router: ProxyRouter
    answer: Callable[[Send], Coroutine[Any, Any, None]] = fine
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of each request that got here."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller has left."""
    app: Callable[[Any, Any, Send], Awaitable[None]] | None = None
    """Answers in the place of all this, as a replica's door."""

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Notes a request and answers it."""
        if self.app:
            found = self.proxy_router.match_route(scope["path"])
            assert found
            return await self.app({**scope, "root_path": found[0].rstrip("/")}, receive, send)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append((scope["path"], headers, (await receive())["body"]))
        answering = asyncio.create_task(self.answer(send))
        watching = asyncio.create_task(self._watch(receive, answering))
        try:
            await answering
        except asyncio.CancelledError:
            self.left.set()
        finally:
            watching.cancel()

    async def _watch(self, receive: Any, answering: "asyncio.Task[None]") -> None:
        """Ends an answer whose caller has left, as Serve does."""
        if (await receive())["type"] == "http.disconnect":
            answering.cancel()


@asynccontextmanager
async def http_door(
    port: Port,
    applications: Mapping[str, str] = APPLICATIONS,
    host: str = "127.0.0.1",
    prefix: str = "/{}",
) -> AsyncIterator[tuple[int, Replicas]]:
    """The number of a port that Serve's own function opens, and the replicas behind it. `prefix` is the route prefix
    of an application, given its name."""
    router = ProxyRouter(lambda deployment, _: SimpleNamespace(deployment_id=deployment))
    served = {DeploymentID(deployment, name): prefix.format(name) for name, deployment in applications.items()}
    router.update_routes({deployment: EndpointInfo(where) for deployment, where in served.items()})
    replicas, [number] = Replicas(router), free_ports(1)
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
