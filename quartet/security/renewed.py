"""A channel that is opened again when the files of its credentials are replaced."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from quartet.security.watched import Watched

DRAIN_S = 3600.0
"""Longest time, in seconds, that calls may go on over the channel before."""


class RenewedChannel(grpc.aio.Channel):
    """A channel whose new calls use the credentials that its files hold now. Calls that are under way go on over the
    channel on which they began. Files that are wrong, or gone, leave the channel as it is.

    gRPC has no client credentials that read their files again: a channel keeps its certificate until it is closed.
    """

    def __init__(self, connect: Callable[[], grpc.aio.Channel], files: Sequence[Path]) -> None:
        """
        Args:
            connect: opens a channel with what the files hold; raises ConfigError if that is wrong.
            files: the files.
        """
        self._watched = Watched(connect, lambda: files)
        self._channel = self._watched()
        self._draining: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        """The channels before, each with the task that closes it."""

    def now(self) -> grpc.aio.Channel:
        """The channel for a new call."""
        channel = self._watched()
        if channel is not self._channel:
            self._draining[self._channel] = asyncio.get_running_loop().create_task(self._drain(self._channel))
            self._channel = channel
        return channel

    async def _drain(self, channel: grpc.aio.Channel) -> None:
        # Without gRPC's own grace: a channel that is closing cannot be closed at once any more.
        await asyncio.sleep(DRAIN_S)
        del self._draining[channel]
        await channel.close()

    async def close(self, grace: float | None = None) -> None:
        """Closes it, as every channel before it."""
        for task in self._draining.values():
            task.cancel()
        channels, self._draining = [*self._draining, self._channel], {}
        await asyncio.gather(*(channel.close(grace) for channel in channels))

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the channel for new calls."""
        return self.now().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for another state of that channel."""
        await self.now().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until that channel is connected."""
        await self.now().channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """A method with one request and one reply."""
        return _Method(self, "unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """A method with one request and a stream of replies."""
        return _Method(self, "unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """A method with a stream of requests and one reply."""
        return _Method(self, "stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """A method with streams of requests and replies."""
        return _Method(self, "stream_stream", arguments, options)


class _Method:
    """A method of the server, called on the channel for new calls."""

    def __init__(self, renewed: RenewedChannel, kind: str, arguments: Any, options: Any) -> None:
        self._renewed, self._kind, self._arguments, self._options = renewed, kind, arguments, options
        self._made: tuple[grpc.aio.Channel, Any] | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        channel = self._renewed.now()
        if self._made is None or self._made[0] is not channel:
            self._made = channel, getattr(channel, self._kind)(*self._arguments, **self._options)
        return self._made[1](*arguments, **options)
