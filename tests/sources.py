"""The learner's part of a push for weights in this process, without a learner. Benchmarks use it too."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import checksum
from quartet.weight_transfer.memory.device_memory import Cuda
from quartet.weight_transfer.place import Place
from quartet.wire.errors import Internal
from tests.carried import place, sender_for

HOST = "127.0.0.1"


class LocalSource:
    """Sends named tensors; what a sender raises arrives as a ServiceError, as from a learner's process."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        bucket_bytes: int,
        stall_s: float,
        senders: int = 1,
        backend: str = "gloo",
        cuda: Cuda | None = None,
    ) -> None:
        self.tensors = tensors
        """Weights to gather; may be replaced between pushes."""
        self._manifest = Manifest.of(tensors, bucket_bytes)
        self.backend = backend
        self._senders: list[Any] = [
            sender_for(backend, self._manifest, host=HOST, stall_s=stall_s, sender=i, senders=senders, cuda=cuda)
            for i in range(senders)
        ]
        self.midway: Callable[[], object] | None = None
        """Called once, in a thread, in the middle of a transfer by one sender, which then goes on."""
        self.transfer_s = 0.0
        """Duration of the last transfer."""
        self.memberships = 0

    @property
    def buckets(self) -> int:
        """Number of parts in which the weights travel."""
        return len(list(self._manifest.buckets()))

    async def places(self) -> list[Place]:
        return [place(self.backend, "learner")] * len(self._senders)

    async def rendezvous(self, backend: str) -> list[tuple[str, int]]:
        assert backend == self.backend
        return [(HOST, sender.rendezvous()) for sender in self._senders]

    async def manifest(self) -> bytes:
        return self._manifest.pack()

    async def join(self, membership: int, world_size: int) -> None:
        await self._on_all("join", membership, world_size)

    async def gather(self, push: int) -> None:
        for sender in self._senders:
            await asyncio.to_thread(sender.load, self.tensors.items(), push)

    async def send(self, push: int) -> str:
        began = time.perf_counter()
        midway, self.midway = self.midway, None
        parts = await (self._on_all("send", push) if midway is None else self._interrupted(midway, push))
        self.transfer_s = time.perf_counter() - began
        return checksum({number: digest for part in parts for number, digest in part.items()})

    async def abandon(self, membership: int) -> None:
        await self._on_all("abandon", membership)

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        await self._on_all("add_newcomers", membership, world_size)

    def leave(self) -> None:
        """Breaks the transfer off, as a `midway`."""
        for sender in self._senders:
            sender.close()

    async def _on_all(self, method: str, *arguments: int) -> list[Any]:
        calls = [asyncio.to_thread(getattr(sender, method), *arguments) for sender in self._senders]
        try:
            return list(await asyncio.gather(*calls))
        except RuntimeError as error:
            raise Internal(f"policy.{method}: {error}") from error

    async def _interrupted(self, midway: Callable[[], object], push: int) -> list[Any]:
        """Half of the buckets, then `midway`, then the rest."""
        [sender] = self._senders
        group, buckets, everything = sender._group, sender._buckets, sender._buckets.numbers
        assert group is not None
        half = len(everything) // 2
        try:
            for number in everything[:half]:
                await asyncio.to_thread(sender._filling.wait, push, number, 5)
                await asyncio.to_thread(group.broadcast, buckets[number])
        except RuntimeError as error:
            raise Internal(f"policy.send: {error}") from error
        await asyncio.to_thread(midway)
        buckets.numbers = everything[half:]
        try:
            return await self._on_all("send", push)
        finally:
            buckets.numbers = everything
