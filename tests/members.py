"""Rollout replicas as plain processes: the real part in a push, real gloo, no vLLM; killing one is cheap."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from protos import rollout_pb2 as pb
from services.common.errors import Unavailable
from services.common.weight_transfer.buckets import Buckets, checksum, digest
from services.common.weight_transfer.gloo import GlooGroup, reach_store
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.shared import SharedBuckets
from services.rollout.fanout import gathered
from services.rollout.weights import WeightMember

HOST = "127.0.0.1"


class StagingEngine:
    """Takes weights as our engines for vLLM do, into a dictionary in place of a model."""

    def __init__(self, backend: str) -> None:
        self.version, self.checksum, self.backend, self.workers = 0, "", backend, 1
        self._segments: list[int] = []
        self._shared: SharedBuckets | None = None
        self._group: GlooGroup | None = None
        self._staged: Buckets | None = None
        self._model: dict[str, torch.Tensor] = {}

    async def join(self, info: dict[str, Any]) -> None:
        await asyncio.to_thread(self._join, info)

    def _join(self, info: dict[str, Any]) -> None:
        self._leave()
        if self.backend == "ipc":
            self._segments = info["segments"]
            return
        [(address, port)] = info["senders"]
        self._group = GlooGroup(
            reach_store(address, port, info["stall_s"]),
            host=info["host"],
            rank=info["rank_offset"],
            world_size=info["world_size"],
            epoch=info["epoch"],
            timeout_s=info["stall_s"],
        )

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._shared = None

    async def pause(self, in_flight: str) -> None:
        """Nothing is generated here."""

    async def receive(self, manifest: Manifest) -> str:
        self._received = await asyncio.to_thread(self._receive, manifest)
        return self._received

    def _receive(self, manifest: Manifest) -> str:
        if self.backend == "ipc":
            self._shared = self._shared or SharedBuckets(self._segments, manifest)
            return self._shared.verify()
        assert self._group is not None
        if self._staged is None or self._staged.manifest != manifest:
            self._staged = Buckets(manifest)
        with ThreadPoolExecutor(1) as hasher:
            digests = {}
            for number in self._staged.numbers:
                self._group.broadcast(self._staged[number])
                digests[number] = hasher.submit(digest, self._staged[number])
            return checksum({number: found.result() for number, found in digests.items()})

    async def commit(self, version: int) -> None:
        await asyncio.to_thread(self._swap)
        self.version, self.checksum = version, self._received

    def _swap(self) -> None:
        """The copy that loading into a model is."""
        received = self._shared or self._staged
        assert received is not None
        for name, tensor in received.tensors():
            if name in self._model:
                self._model[name].copy_(tensor)
            else:
                self._model[name] = tensor.clone()
        if self._shared is not None:
            self._shared.check()

    async def abort(self) -> bool:
        self._leave()
        return True


async def serve(name: str, backend: str) -> None:
    """Answers phases, each a length and its bytes on standard input, in any order on standard output."""
    member = WeightMember(StagingEngine(backend), name, HOST)  # type: ignore[arg-type]
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # Libraries print to standard output as they like; from here on that is standard error.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    running = set()

    async def answer(number: int, phase: bytes) -> None:
        report = (await member.carry_out(pb.WeightPhase.FromString(phase))).SerializeToString()
        output.write(struct.pack("<ii", number, len(report)) + report)
        output.flush()

    print("ready", file=sys.stderr, flush=True)
    while True:
        try:
            number, size = struct.unpack("<ii", await reader.readexactly(8))
        except asyncio.IncompleteReadError:
            os._exit(0)
        task = asyncio.create_task(answer(number, await reader.readexactly(size)))
        running.add(task)
        task.add_done_callback(running.discard)


class MemberProcess:
    """One of them, seen from the test."""

    def __init__(self, name: str, backend: str = "gloo") -> None:
        self.name = name
        self._backend = backend
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = 0

    async def start(self) -> "MemberProcess":
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.members", self.name, self._backend,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stderr is not None
        while b"ready" not in await self.process.stderr.readline():
            assert self.process.returncode is None
        self._reading = asyncio.create_task(self._read())
        self._draining = asyncio.create_task(self.process.stderr.read())
        return self

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while True:
                number, size = struct.unpack("<ii", await self.process.stdout.readexactly(8))
                report = await self.process.stdout.readexactly(size)
                answer = self._answers.pop(number)
                if not answer.done():
                    answer.set_result(report)
        except asyncio.IncompleteReadError:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(Unavailable(f"{self.name} died"))

    async def carry_out(self, phase: pb.WeightPhase) -> bytes:
        if self.process.returncode is not None or self._reading.done():
            raise Unavailable(f"{self.name} is dead")
        self._numbers += 1
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[self._numbers] = answer
        data = phase.SerializeToString()
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<ii", self._numbers, len(data)) + data)
        return await answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await asyncio.gather(self._reading, self._draining)


Hook = Callable[[], Awaitable[None]]


class Fleet:
    """Stands in for the rollout client, and for the replica that fans phases out."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self.members: dict[str, MemberProcess] = {}
        self.before: dict[str, Hook] = {}
        """What happens before a phase is sent, once."""
        self.phases: list[str] = []

    async def add(self, *names: str) -> None:
        for member in await asyncio.gather(*(MemberProcess(name, self._backend).start() for name in names)):
            self.members[member.name] = member

    async def update_weights(
        self, timeout_s: float, members: Collection[str] = (), **phase: Any
    ) -> list[pb.WeightReport]:
        (name,) = phase
        self.phases.append(name)
        if hook := self.before.pop(name, None):
            await hook()
        message = pb.WeightPhase(timeout_s=timeout_s, **phase)
        answers = [member.carry_out(message) for member in self.members.values()]
        return await gathered(answers, members, timeout_s + 1)

    async def versions(self) -> dict[str, int]:
        """Of those that answer within a second."""
        self.phases.clear()
        reports = await self.update_weights(1, discover=pb.Discover())
        return {report.replica: report.policy_version for report in reports}

    async def end(self) -> None:
        await asyncio.gather(*(member.end() for member in self.members.values()))


def weights(seed: int, mib: int) -> dict[str, torch.Tensor]:
    """Eight tensors of `mib` MiB together."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(mib << 15, generator=generator) for i in range(8)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(*sys.argv[1:]))
