"""Calls of Generate, one after the other, with an eye on the responses that have begun."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc

from quartet.wire.codec import Ints
from services.rollout.client import RolloutClient
from services.rollout.sample import Sample, Sampling


class Listener:
    """A call on its way while other things happen, and another after it until something has."""

    def __init__(self, channel: grpc.aio.Channel, prompts: Sequence[Ints], sampling: Sampling) -> None:
        self._client, self._prompts, self._sampling = RolloutClient(channel), prompts, sampling
        stub: Any = self._client._stub
        self._generate = stub.Generate
        self._client._stub = SimpleNamespace(Generate=self._heard)  # type: ignore[assignment]
        self._begun: dict[str, set[int]] = {}
        self.heard = asyncio.Event()
        """Set when the first message has come."""
        self.samples: list[Sample] = []
        """Samples of calls that have ended."""

    def unfinished(self) -> list[str]:
        """Replicas that sent tokens of responses without having ended them."""
        return [replica for replica, begun in list(self._begun.items()) if begun]

    async def run(self, done: threading.Event) -> None:
        """Calls until `done`; fails if a call loses a sample, or has one twice."""
        while not done.is_set():
            self._begun.clear()
            stream = self._client.generate(self._prompts, self._sampling, timeout_s=120, stall_s=8)
            came = [sample async for some in stream for sample in some]
            assert sorted(sample.index for sample in came) == list(range(len(self._prompts)))
            self.samples += came

    def _heard(self, request: Any, **options: Any) -> "_Heard":
        return _Heard(self._generate(request, **options), self._begun, self.heard)


class _Heard:
    """A stream of Generate, which notes what has begun and not ended."""

    def __init__(self, stream: Any, begun: dict[str, set[int]], heard: asyncio.Event) -> None:
        self._stream, self._begun, self._any = stream, begun, heard
        self.cancel = stream.cancel

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._stream:
            known = self._begun.setdefault(message.replica, set())
            known |= {segment.index for segment in message.segments}
            known -= {segment.index for segment in message.segments if segment.finish_reason}
            self._any.set()
            yield message
