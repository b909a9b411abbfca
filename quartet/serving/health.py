"""Health of a replica's model, answered as grpc.health.v1."""

import asyncio
import logging
from typing import Protocol

from grpc_health.v1 import health_pb2

log = logging.getLogger("quartet")


class HasHealth(Protocol):
    """A deployment with Serve's health hook."""

    async def check_health(self) -> None: ...


class HealthMixin:
    """Answers grpc.health.v1's Check with the health of the model behind the replica.

    Serve's proxy sends Check here (quartet/serving/proxy.py), so that any standard health prober sees whether
    the model works, and not only whether a process listens.
    """

    async def Check(self: HasHealth, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Answers SERVING or NOT_SERVING."""
        try:
            async with asyncio.timeout(10):
                await self.check_health()
            status = health_pb2.HealthCheckResponse.SERVING
        except Exception as error:
            log.warning("unhealthy: %s", error)
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)
