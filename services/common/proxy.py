"""What Quartet adds to Serve's gRPC proxy: standard health checks, and a port that listens where it should."""

import os
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
