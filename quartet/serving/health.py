"""Health of a replica's model, answered as grpc.health.v1."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from grpc_health.v1 import health_pb2

log = logging.getLogger("quartet")
HEALTH_S = 10.0
"""Longest time, in seconds, that a check takes."""


class HealthMixin(ABC):
    """Answers grpc.health.v1's Check with the health of the model behind the replica.

    Serve's proxy sends Check here (quartet/serving/proxy.py), so that any standard health prober sees whether
    the model works, and not only whether a process listens.
    """

    @abstractmethod
    async def check_health(self) -> None:
        """Raises if the replica is ill; Serve calls it too."""

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Answers SERVING or NOT_SERVING."""
        return health_reply(await healthy(self.check_health))


async def healthy(check: Callable[[], Awaitable[None]]) -> bool:
    """False if the check, which raises if the replica is ill, does so or does not end in time."""
    try:
        async with asyncio.timeout(HEALTH_S):
            await check()
    except Exception as error:
        log.warning("unhealthy: %s", error)
        return False
    return True


def health_reply(serving: bool) -> health_pb2.HealthCheckResponse:
    """The answer of grpc.health.v1."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    return health_pb2.HealthCheckResponse(status=status)
