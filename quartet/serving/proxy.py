"""Additions to Serve's proxy: guarded ports, streams that end with their caller, standard health checks. Serve calls
these functions by their names in the YAML file and in the environment."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.middleware import Middleware

from quartet.config.base import ConfigError
from quartet.seams import serve
from quartet.security.file_limit import raise_file_limit
from quartet.security.gate import Gate
from quartet.security.port import GUARD, Port
from quartet.serving.door.call import CallContext
from quartet.serving.door.connections import Connections
from quartet.serving.door.guard import APPLICATION
from quartet.serving.door.http_guard import HttpGuard
from quartet.serving.door.http_server import UVICORN, WatchedServer
from quartet.serving.door.log_lines import shorten_failed_calls
from quartet.serving.door.open_calls import OpenCalls
from quartet.serving.door.port import open_port, routes_of, watched_directory
from quartet.serving.door.routes import Routes

_ATTENDED = "quartet_attended"
_FIRST = f"grpc_options.grpc_servicer_functions: should begin with {GUARD}"
StreamHandler = Callable[[Any, Any], AsyncIterator[bytes]]


class _Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 on the proxy: the service's name chooses the application, whose replica answers."""

    def __init__(self, ask: Callable[[Any, Any], Any], routes: Routes) -> None:
        self._ask = ask
        self._routes = routes

    async def Check(self, request: Any, context: Any) -> Any:
        """Answers for a service such as `quartet.v1.Reward`, an application's name, or both names of one scorer of an
        application, `reward/taste`; an empty name asks for the proxy."""
        if not request.service:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        application = request.service.partition("/")[0]
        if application in self._routes.services():
            return await self._of(request, context, application)
        serving = self._routes.applications(request.service)
        if len(serving) == 1:
            return await self._of(request, context, serving[0])
        context.set_code(grpc.StatusCode.INVALID_ARGUMENT if serving else grpc.StatusCode.NOT_FOUND)
        reason = (
            f"several applications serve it; name one: {', '.join(serving)}"
            if serving
            else "no application serves it"
        )
        context.set_details(f"service: {request.service[:64]!r}: {reason}")
        return health_pb2.HealthCheckResponse()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Refused, which tells probers to ask by Check."""
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("grpc.health.v1.Health/Watch: ask by Check")
        return
        yield  # makes it a stream, which ends at once

    async def List(self, request: Any, context: Any) -> None:
        """Refused like Watch; a method of grpcio-health-checking later than 1.81."""
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("grpc.health.v1.Health/List: ask by Check")

    async def _of(self, request: Any, context: Any, application: str) -> Any:
        metadata = tuple(pair for pair in context.invocation_metadata() or () if pair[0] != APPLICATION)
        call = CallContext(context, (*metadata, (APPLICATION, application)))
        reply = await self._ask(request, call)
        # If Serve itself answers, for instance because a replica died, the reply is empty and has a status.
        return health_pb2.HealthCheckResponse.FromString(reply)


def end_with_caller(_servicer: Any, server: Any) -> None:
    """Ends a stream in the replica too when its caller goes away. Stands first in `grpc_servicer_functions`.

    Serve's proxy passes on a caller's leaving only while it waits for the replica. If the caller leaves while a
    message is being written to it, the replica would go on streaming in vain.

    Raises:
        ConfigError: the port stands open on every address, unguarded, as it does on a cluster that was started
            without Quartet's settings; or other functions stand before this one.
    """
    routes_of(server)
    # Serve itself adds its own service before all others.
    before = {name for name in serve.service_names(server) if not name.startswith("ray.serve.")}
    if before:
        raise ConfigError(f"{_FIRST}; it comes after those of {', '.join(sorted(before))}")
    setattr(server, _ATTENDED, True)
    serve.wrap_streams(server, _attended)


def _attended(stream: StreamHandler) -> StreamHandler:
    """The same stream, read by a separate task. The task does nothing but wait for the next message, so that
    cancelling it always reaches the replica."""

    # A CallContext, as the task ends after the call, and Serve asks for the caller's address at the very end.
    async def attended(request: Any, call: CallContext) -> AsyncIterator[bytes]:
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in stream(request, call):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        reading = asyncio.create_task(read())
        call.add_done_callback(lambda _: reading.cancel())
        while (message := await messages.get()) is not None:
            yield message
        await reading

    return attended


def add_health(_servicer: Any, server: Any) -> None:
    """Adds grpc.health.v1 without `application` metadata, which health probers cannot send. For
    `grpc_servicer_functions`."""
    ask = serve.asks_replica(server, f"/{health.SERVICE_NAME}/Check")
    server.add_passthrough_service(health.SERVICE_NAME)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(ask, routes_of(server)), server)


def _start_attended_only(server: Any) -> None:
    """Makes the server's start an error unless `end_with_caller` has been called, so that it answers no call then."""
    start = server.start

    async def start_attended() -> None:
        if not getattr(server, _ATTENDED, False):
            raise ConfigError(f"{_FIRST}; it is missing")
        await start()

    server.start = start_attended


def bind_to_host() -> list[Any]:
    """Makes Serve open its gRPC port with a guard and on the address of `Port.of()`, not on all interfaces, and
    listen on its HTTP port only if that port says so, with a guard too.

    Serve has no such options. `quartet up` names this function in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, which
    every proxy calls before it opens its ports.

    Returns:
        The HTTP middlewares that Serve expects from this function: the guard of a port that listens.

    Raises:
        ConfigError: this version of Serve opens its ports by other functions.
    """

    calls: OpenCalls | None = None

    def open_grpc(server: Any, address: str, reuse: bool) -> None:
        open_port(server, int(address.rpartition(":")[2]), Port.of(), reuse=reuse, calls=calls)
        _start_attended_only(server)

    port = Port.of()
    shorten_failed_calls()
    if not port.http:
        serve.open_ports_by(open_grpc, NoServer)
        return []
    port.opened()
    gate = Gate(watched_directory(port))
    calls = OpenCalls(lambda: gate.limits)
    connections = Connections(lambda: gate.limits, raise_file_limit())
    serve.open_ports_by(open_grpc, partial(WatchedServer, connections), **UVICORN)
    return [Middleware(HttpGuard, gate, connections, calls)]


class NoServer:
    """Stands in for uvicorn's server, for which Serve binds its HTTP port, and does not listen there.

    Through that port a web page could make a browser of this machine send requests, and connections that rest there
    would take the files of the process that serves gRPC.
    """

    def __init__(self, config: Any) -> None:
        """Takes uvicorn's configuration, of which it needs nothing."""

    async def serve(self, sockets: Any) -> None:
        """Waits for as long as uvicorn's server would serve, with the bound sockets."""
        await asyncio.Event().wait()
