"""Replicas that play their real part in a push, on engines that only take notes, and a learner's end of it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.prover import Prover
from orchestrator.push.pusher import WeightPusher
from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place
from quartet.wire.codec import Floats, Ints
from quartet.wire.errors import InvalidArgument, Unavailable
from services.rollout.member import WeightMember
from tests.unit.member_phases import MANIFEST, FakeEngine

PUSH = ["discover", "prepare", "transfer", "commit"]
"""The phases of a push in which nothing fails."""


class NoteTaker(FakeEngine):
    """An engine that receives what the source sends."""

    def __init__(self, source: "FakeSource", workers: int) -> None:
        super().__init__("auto")
        self.version, self.checksum, self.workers, self.place = 0, "", workers, Place("m")
        self.source = source
        self.joined: list[dict[str, Any]] = []
        self.garbles = False
        self.vocab_size = 64
        self.off_by = 0.0
        """Difference of the engine's log-probs from the learner's."""
        self.misfit = ""
        """The reason that a push does not fit; empty if it does."""

    async def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append(f"pause {arguments[0]}" if name == "pause" else name)

    def check(self, manifest: Manifest) -> None:
        assert manifest == MANIFEST
        if self.misfit:
            raise InvalidArgument(self.misfit)

    async def join(self, init_info: dict[str, Any]) -> None:
        await super().join(init_info)
        self.joined.append(init_info)

    async def receive(self, manifest: Manifest) -> str:
        await super().receive(manifest)
        assert manifest == MANIFEST
        return "garbled" if self.garbles else self.source.checksum

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        self.calls.append("score")
        return [row + np.float32(self.off_by) for row in await self.source.score(sequences)]

    async def stale(self) -> list[str]:
        return ["lm_head"] if self.off_by else []


class FakeSource:
    """The learner's end."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.checksum = "sum"
        self.at = [Place("m")]
        self.failures: list[Exception] = []
        self.memberships = 0

    async def places(self) -> list[Place]:
        return self.at

    async def rendezvous(self, backend: str) -> list[tuple[str, int]]:
        self.calls.append(("rendezvous", backend))
        return [("10.0.0.1", 4000)]

    async def manifest(self) -> bytes:
        return MANIFEST.pack()

    async def join(self, membership: int, world_size: int) -> None:
        self.calls.append(("join", membership, world_size))

    async def score(self, sequences: Sequence[Ints]) -> list[Floats]:
        return [np.float32(-1 / 64) * row[1:].astype(np.float32) for row in sequences]

    async def gather(self, push: int) -> None:
        self.calls.append("gather")

    async def abandon(self, membership: int) -> None:
        self.calls.append(("abandon", membership))

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        self.calls.append(("add_newcomers", membership, world_size))
        if self.failures:
            raise self.failures.pop(0)

    async def send(self, push: int) -> str:
        self.calls.append("send")
        if self.failures:
            raise self.failures.pop(0)
        return self.checksum


class Fleet:
    """Stands in for the rollout client: fans a phase out to its replicas."""

    def __init__(self, source: FakeSource, **workers: int) -> None:
        self.source = source
        self.lease = common_pb2.Lease(run_id="ours", number=1)
        self.proved: pb.Proof | None = None
        self.engines: dict[str, NoteTaker] = {}
        self.members: dict[str, WeightMember] = {}
        self.phases: list[str] = []
        self.timeouts: list[float] = []
        self.awaited: list[list[str]] = []
        """The members of each phase, for whose answers it waits."""
        self.mute: set[tuple[str, str]] = set()
        """(replica, phase): no answer, as of one that died."""
        self.down: list[str] = []
        """Phases whose call fails as a whole, once."""
        self.afterwards: dict[str, Callable[[], None]] = {}
        """Phase -> called once, after that phase."""
        self.add(**workers)

    def add(self, **workers: int) -> None:
        for name, count in workers.items():
            self.engines[name] = NoteTaker(self.source, count)
            member = WeightMember(self.engines[name], name)  # type: ignore[arg-type]
            member._fence.claim(self.lease, common_pb2.Claim(ttl_s=60))
            self.members[name] = member

    def remove(self, name: str) -> None:
        del self.engines[name], self.members[name]

    async def update_weights(self, timeout_s: float, members: Any = (), **phase: Any) -> list[pb.WeightReport]:
        (name,) = phase
        self.phases.append(name)
        self.timeouts.append(timeout_s)
        self.awaited.append(sorted(members))
        if name in self.down:
            self.down.remove(name)
            raise Unavailable(f"rollout.UpdateWeights({name}): the proxy is gone")
        message = pb.WeightPhase(timeout_s=timeout_s, lease=self.lease, proved=self.proved, **phase)
        assert message.prepare.stall_s <= timeout_s  # replicas refuse it otherwise
        answering = [member for key, member in self.members.items() if (key, name) not in self.mute]
        reports = list(await asyncio.gather(*(member.carry_out(message) for member in answering)))
        self.afterwards.pop(name, lambda: None)()
        return reports

    @property
    def versions(self) -> dict[str, int]:
        return {name: engine.version for name, engine in self.engines.items()}


def make_pusher(fleet: Fleet, backend: str = "gloo", *, prover: Prover | None = None, **config: Any) -> WeightPusher:
    settings: dict[str, Any] = {
        "host": "10.0.0.1",
        "timeout_s": 9,
        "stall_s": 4,
        "control_s": 2,
        "patience_s": 0.1,
        "attempts": 3,
    }
    weights = WeightsConfig(**settings | config)
    return WeightPusher(fleet, fleet.source, backend, weights, prover)  # type: ignore[arg-type]
