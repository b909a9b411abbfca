"""The asynchronous client that the four services' clients are made of.

Needs grpcio and nothing of Ray, vLLM or torch, so that anything can call a service.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from services.common.errors import DeadlineExceeded, Unavailable, from_rpc

Stub = TypeVar("Stub")

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Left alone, gRPC waits longer and longer to reconnect, up to two minutes: past our deadlines.
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def open_channel(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to Serve's gRPC proxy at host:port; encrypted when given credentials."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)


class Backoff:
    """Pauses that double, until a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + timeout_s
        self._pause = _FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a millisecond: gRPC takes no deadline in the past."""
        return max(self._end - self._clock(), 1e-3)

    async def wait(self, error: Exception) -> None:
        """Pauses before the next try; raises `error` when the deadline would pass first."""
        if self._clock() + self._pause >= self._end:
            raise error
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)


class ServiceClient(Generic[Stub]):
    """A client of one application behind a Serve proxy.

    Every call has a deadline. UNAVAILABLE is tried again until then: all calls are safe to repeat
    (Train carries a step id). Any other failure is raised as its ServiceError.
    """

    def __init__(self, channel: grpc.aio.Channel, stub: Callable[[grpc.aio.Channel], Stub], application: str) -> None:
        self._channel = channel
        self._stub = stub(channel)
        self.application = application
        """Name of the Serve application that is called."""
        self._metadata = (("application", application),)

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any, timeout_s: float, name: str) -> Any:
        backoff = Backoff(timeout_s)
        call = f"{self.application}.{name}"
        while True:
            try:
                return await method(request, metadata=self._metadata, timeout=backoff.left_s)
            except grpc.RpcError as error:
                failure = from_rpc(error, call)
            if isinstance(failure, DeadlineExceeded):
                raise DeadlineExceeded(f"{call}: no answer within {timeout_s:g} s")
            if not isinstance(failure, Unavailable):
                raise failure
            await backoff.wait(failure)

    async def reachable(self, timeout_s: float) -> bool:
        """Whether a gRPC server takes the channel's connection within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Closes the channel, for all clients that share it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
