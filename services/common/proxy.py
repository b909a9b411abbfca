"""What Quartet adds to Serve's gRPC proxy: streams that end with their caller, standard health checks, and a port
that listens where it should."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_APPLICATIONS = {
    "quartet.v1.Rollout": "rollout",
    "quartet.v1.Reward": "reward",
    "quartet.v1.Reference": "reference",
    "quartet.v1.Critic": "critic",
}


class _ForApplication:
    """A servicer context that names the application, as Serve's routing expects it of its callers."""

    def __init__(self, context: Any, application: str) -> None:
        self._context = context
        self._application = application

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        given = tuple((key, value) for key, value in self._context.invocation_metadata() if key != "application")
        return (*given, ("application", self._application))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 on the proxy: the service's name chooses the application, whose replica answers."""

    def __init__(self, server: Any) -> None:
        from ray.serve._private.proxy_request_response import gRPCStreamingType

        self._ask = server.service_handler_factory(f"/{health.SERVICE_NAME}/Check", gRPCStreamingType.UNARY_UNARY)

    async def Check(self, request: Any, context: Any) -> Any:
        """`quartet.v1.Rollout` or just `rollout`; an empty name asks whether the proxy itself serves."""
        if not request.service:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        application = _APPLICATIONS.get(request.service, request.service)
        reply = await self._ask(request, _ForApplication(context, application))
        return health_pb2.HealthCheckResponse.FromString(reply)


Stream = Callable[[Any, Any], AsyncIterator[bytes]]


def end_with_caller(_servicer: Any, server: Any) -> None:
    """For `grpc_servicer_functions`, before all others: a caller that goes away ends its stream in the replica too.

    Serve's proxy passes the end on only while it waits for the replica; to a caller that leaves while a message is
    being written to it, the replica goes on streaming, for nobody.
    """
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    make = server.service_handler_factory

    def factory(service_method: str, streaming_type: Any) -> Any:
        handler = make(service_method=service_method, streaming_type=streaming_type)
        return _attended(handler) if streaming_type is gRPCStreamingType.UNARY_STREAM else handler

    server.service_handler_factory = factory


def _attended(stream: Stream) -> Stream:
    """The same stream, read by a task of its own. That does nothing but wait for the next message, so that its end
    always reaches whoever is to send it."""

    async def attended(request: Any, context: Any) -> AsyncIterator[bytes]:
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in stream(request, context):
                    messages.put_nowait(message)
            finally:
                messages.put_nowait(None)

        reading = asyncio.create_task(read())
        context.add_done_callback(lambda _: reading.cancel())
        while (message := await messages.get()) is not None:
            yield message
        await reading

    return attended


def add_health(_servicer: Any, server: Any) -> None:
    """For `grpc_servicer_functions`: grpc.health.v1 without the `application` metadata no prober can send."""
    server.add_passthrough_service(health.SERVICE_NAME)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(server), server)


def bind_to_host() -> list[Any]:
    """Makes Serve's gRPC proxy listen on QUARTET_GRPC_HOST (127.0.0.1 when unset) and not on all interfaces.

    Serve has no such option. `quartet up` names this function in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, which
    every proxy calls before it opens its ports.

    Returns:
        No HTTP middlewares, which is what Serve calls it for.
    """
    from ray.serve._private import default_impl

    host = os.environ.get("QUARTET_GRPC_HOST", "127.0.0.1")

    def add_grpc_address(server: grpc.aio.Server, address: str) -> None:
        server.add_insecure_port(f"{host}:{address.rpartition(':')[2]}")

    default_impl.add_grpc_address = add_grpc_address
    return []
