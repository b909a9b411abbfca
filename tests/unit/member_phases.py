"""Helpers that play the phases of a push to a member with a fake engine."""

import asyncio
from typing import Any

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.place import Place
from quartet.wire.errors import InvalidArgument
from services.rollout.interface import NO_VERSION
from services.rollout.member import WeightMember

MANIFEST = Manifest(("w",), ("float32",), ((2,),), 8)


LEASE = common_pb2.Lease(run_id="ours", number=4)


class FakeEngine:
    """Notes what it is told; fails or hangs where it is told to."""

    def __init__(self, backend: str = "gloo") -> None:
        self.version, self.checksum, self.backend, self.workers = 3, "old", backend, 2
        self.place = Place("m", ("GPU-1", "GPU-2"))
        self.whole = True
        self.longest_manifest = 100
        self.calls: list[Any] = []
        self.failing: dict[str, Exception] = {}
        self.hanging: set[str] = set()
        self.free = asyncio.Event()
        """Set: what hangs goes on."""

    async def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.hanging:
            await self.free.wait()
        if name in self.failing:
            raise self.failing[name]

    def check(self, manifest: Manifest) -> None:
        if manifest.shapes != MANIFEST.shapes:
            raise InvalidArgument(f"manifest: {manifest.shapes}")

    async def join(self, init_info: dict[str, Any]) -> None:
        await self._note("join", init_info)

    async def leave(self) -> None:
        await self._note("leave")

    async def rest(self) -> None:
        await self._note("rest")

    async def check_health(self) -> None:
        if "check_health" in self.hanging:
            await self.free.wait()

    async def pause(self, in_flight: str) -> None:
        await self._note("pause", in_flight)

    async def receive(self, manifest: Manifest) -> str:
        await self._note("receive", manifest)
        return "new"

    async def commit(self, version: int) -> None:
        await self._note("commit", version)
        self.version, self.checksum = version, "new"

    async def abort(self) -> bool:
        await self._note("abort")
        if not self.whole:
            self.version = NO_VERSION
        return self.whole


async def held(engine: FakeEngine) -> WeightMember:
    """Claimed by our run."""
    member = WeightMember(engine, "me")  # type: ignore[arg-type]
    assert (await claim(member, LEASE)).ok
    return member


async def claim(member: WeightMember, lease: common_pb2.Lease, **claim: Any) -> pb.WeightReport:
    asked = common_pb2.Claim(**{"ttl_s": 60} | claim)
    return await member.carry_out(pb.WeightPhase(timeout_s=5, lease=lease, claim=asked))


def prepare(membership: int, stall_s: float = 7, **ranks: int) -> dict[str, Any]:
    ranks = ranks or {"me": 3, "other": 1}
    message = pb.Prepare(
        membership=membership,
        senders=[pb.Rendezvous(address="10.0.0.1", port=4000)],
        world_size=5,
        ranks=ranks,
        in_flight="keep",
        bucket_bytes=64,
        stall_s=stall_s,
        manifest=MANIFEST.pack(),
        backend="gloo",
    )
    return {"prepare": message}


def transfer(membership: int) -> dict[str, Any]:
    return {"transfer": pb.Transfer(membership=membership, manifest=MANIFEST.pack())}


def good(version: int, membership: int, checksum: str = "", timeline: int = 0) -> pb.WeightReport:
    report = pb.WeightReport(
        replica="me", ok=True, policy_version=version, membership=membership, workers=2, checksum=checksum
    )
    report.timeline = timeline
    report.place.CopyFrom(pb.Place(machine="m", gpus=["GPU-1", "GPU-2"]))
    return report


async def play(member: WeightMember, phase: dict[str, Any], timeout_s: float = 5) -> pb.WeightReport:
    report = await member.carry_out(pb.WeightPhase(timeout_s=timeout_s, lease=LEASE, **phase))
    assert report.held.lease == LEASE
    report.ClearField("held")
    return report


def names(engine: FakeEngine) -> list[str]:
    return [call[0] for call in engine.calls]


OLDER, NEWER = common_pb2.Lease(run_id="older", number=3), common_pb2.Lease(run_id="newer", number=5)
