"""Rollout replicas as plain processes: the real part in a push, real gloo, no vLLM; starting one is cheap."""

import asyncio
import multiprocessing
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import torch

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.receiver import Joining
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import Unavailable
from services.rollout.fanout import reports_of
from services.rollout.member import WeightMember
from tests.carried import place, receiver_for
from tests.forked import FORKED
from tests.sized import VOCABULARY, score
from tests.unit.fake_cuda import FOLDER, FakeGpu

HOST = "127.0.0.1"
LEASE = common_pb2.Lease(run_id="members", number=1)
"""The lease with which every member is claimed from the start."""
READY = b"ready"


class StagingEngine:
    """Takes weights as our engine for vLLM does, into a dictionary in place of a model."""

    def __init__(self, backend: str, device: torch.device, name: str) -> None:
        self.version, self.checksum, self.backend, self.workers = 0, "", backend, 1
        self.vocab_size = VOCABULARY
        self.longest_manifest = 1 << 20
        self.place = place(backend, name)
        self._device = device
        self._receiver = receiver_for(backend, device, FakeGpu.of(backend))
        self._manifest: Manifest | None = None
        self._model: dict[str, torch.Tensor] = {}

    def check(self, manifest: Manifest) -> None:
        """Anything fits a dictionary."""

    async def join(self, info: dict[str, Any]) -> None:
        await asyncio.to_thread(self._receiver.join, Joining(**info))

    async def leave(self) -> None:
        self._receiver.close()

    async def rest(self) -> None:
        """Does nothing: the dictionary needs no cache."""

    async def check_health(self) -> None:
        pass

    async def pause(self, in_flight: str) -> None:
        """Nothing is generated here."""

    async def receive(self, manifest: Manifest) -> str:
        self._manifest = manifest
        self._received = await asyncio.to_thread(self._receiver.receive, manifest)
        return self._received

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Scores by a model of the size of the pushed weights, which themselves are not computed with."""
        mib = sum(tensor.nbytes for tensor in self._model.values()) >> 20
        return await asyncio.to_thread(score, mib, sequences)

    async def stale(self) -> list[str]:
        return []

    async def commit(self, version: int) -> None:
        await asyncio.to_thread(self._swap)
        self.version, self.checksum = version, self._received

    def _swap(self) -> None:
        """The copy that loading into a model is."""
        assert self._manifest is not None
        for bucket, data in self._receiver.buckets():
            for name, tensor in self._manifest.cut(bucket, data.to(self._device)):
                if name in self._model:
                    self._model[name].copy_(tensor)
                else:
                    self._model[name] = tensor.clone()
        self._receiver.check()

    async def abort(self) -> bool:
        self._receiver.close()
        return True


async def serve(answers: socket.socket, name: str, backend: str, device: str) -> None:
    """Answers phases, each a number, a length and its bytes, in any order, until the other end closes."""
    member = WeightMember(StagingEngine(backend, torch.device(device), name), name)  # type: ignore[arg-type]
    claim = common_pb2.Claim(ttl_s=600)
    assert (await member.carry_out(pb.WeightPhase(timeout_s=10, lease=LEASE, claim=claim))).ok
    reader, writer = await asyncio.open_unix_connection(sock=answers)
    running = set()

    async def answer(number: int, phase: bytes) -> None:
        report = (await member.carry_out(pb.WeightPhase.FromString(phase))).SerializeToString()
        writer.write(struct.pack("<ii", number, len(report)) + report)

    writer.write(READY)
    while True:
        try:
            number, size = struct.unpack("<ii", await reader.readexactly(8))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)
        task = asyncio.create_task(answer(number, await reader.readexactly(size)))
        running.add(task)
        task.add_done_callback(running.discard)


def run(gpu: str, *arguments: Any) -> None:
    """`serve` in a process of its own. `gpu` is the folder that stands for a GPU's memory, if one does."""
    torch.set_num_threads(1)
    if gpu:
        os.environ[FOLDER] = gpu
    asyncio.run(serve(*arguments))


class MemberProcess:
    """One of them, seen from the test."""

    def __init__(self, name: str, backend: str = "gloo", device: str = "cpu") -> None:
        self.name = name
        self._ours, theirs = socket.socketpair()
        # CUDA does not work in forks of a process that has looked for GPUs, as importing DeepSpeed does.
        context: Any = FORKED if device == "cpu" else multiprocessing.get_context("spawn")
        arguments = (os.environ.get(FOLDER, ""), theirs, name, backend, device)
        self._process = context.Process(target=run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = 0

    async def start(self) -> "MemberProcess":
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)
        assert await self._reader.readexactly(len(READY)) == READY
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        try:
            while True:
                number, size = struct.unpack("<ii", await self._reader.readexactly(8))
                report = await self._reader.readexactly(size)
                answer = self._answers.pop(number)
                if not answer.done():
                    answer.set_result(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(Unavailable(f"{self.name} died"))

    async def carry_out(self, phase: pb.WeightPhase) -> bytes:
        if self._reading.done():
            raise Unavailable(f"{self.name} is dead")
        self._numbers += 1
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[self._numbers] = answer
        data = phase.SerializeToString()
        self._writer.write(struct.pack("<ii", self._numbers, len(data)) + data)
        return await answer

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    async def end(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        await self._reading
        self._writer.close()


Hook = Callable[[], Awaitable[None]]


class Fleet:
    """Stands in for the rollout client, and for the replica that fans phases out."""

    def __init__(self, backend: str = "gloo", device: str = "cpu") -> None:
        self._backend, self._device = backend, device
        self.members: dict[str, MemberProcess] = {}
        self.before: dict[str, Hook] = {}
        """Phase -> called once, before that phase is sent."""
        self.stopping: set[str] = set()
        """Members that are told nothing more, as a replica that Serve stops; they live on for a while."""
        self.phases: list[str] = []
        self.slow_s = 0.0
        """Time that the next commit takes besides its own."""

    async def add(self, *names: str) -> None:
        made = [MemberProcess(name, self._backend, self._device) for name in names]
        for member in await asyncio.gather(*(one.start() for one in made)):
            self.members[member.name] = member

    async def update_weights(
        self, timeout_s: float, members: Collection[str] = (), **phase: Any
    ) -> list[pb.WeightReport]:
        (name,) = phase
        self.phases.append(name)
        if hook := self.before.pop(name, None):
            await hook()
        message = pb.WeightPhase(timeout_s=timeout_s, lease=LEASE, members=members, **phase)
        if name == "commit":
            slow_s, self.slow_s = self.slow_s, 0.0
            await asyncio.sleep(slow_s)
        answers = [member.carry_out(message) for name, member in self.members.items() if name not in self.stopping]
        return await reports_of(message, answers)

    async def versions(self) -> dict[str, int]:
        """Versions of the members that answer within a second."""
        self.phases.clear()
        reports = await self.update_weights(1, discover=pb.Discover())
        return {report.replica: report.policy_version for report in reports}

    async def end(self) -> None:
        await asyncio.gather(*(member.end() for member in self.members.values()))


def weights(seed: int, mib: int) -> dict[str, torch.Tensor]:
    """Eight tensors of `mib` MiB together."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(mib << 15, generator=generator) for i in range(8)}
