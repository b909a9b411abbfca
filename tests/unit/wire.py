"""A real gRPC server on the loopback, with servicers that follow a script."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from quartet.wire.client import open_channel


@dataclass
class Script:
    """Fails once with each of `failures`, then answers `reply`; with `hangs`, never answers."""

    reply: Any = None
    failures: list[grpc.StatusCode] = field(default_factory=list)
    hangs: bool = False
    requests: list[Any] = field(default_factory=list)
    applications: list[str] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)
    """Until the deadline of each request, when it came."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self.requests.append(request)
        self.left_s.append(context.time_remaining())
        self.applications.append(dict(context.invocation_metadata())["application"])
        if self.failures:
            await context.abort(self.failures.pop(0), "said the script")
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return self.reply


@asynccontextmanager
async def served(
    add: Callable[[Any, grpc.aio.Server], None], servicer: Any, *, most_bytes: int = -1
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that runs this servicer and reads messages of at most so many bytes."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", most_bytes)])
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            yield channel
    finally:
        await server.stop(None)
