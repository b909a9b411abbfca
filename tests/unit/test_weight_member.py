"""A replica's part in a push: phases in order, failures rolled back, reports that say what happened."""

import asyncio
from typing import Any

import pytest

from protos import rollout_pb2 as pb
from services.common.weight_transfer.manifest import Manifest
from services.rollout.interface import LOST
from services.rollout.weights import WeightMember

MANIFEST = Manifest(("w",), ("float32",), ((2,),), 8)


class FakeEngine:
    """Notes what it is told; fails or hangs where it is told to."""

    def __init__(self, backend: str = "gloo") -> None:
        self.version, self.checksum, self.backend, self.workers = 3, "old", backend, 2
        self.whole = True
        self.calls: list[Any] = []
        self.failing: dict[str, Exception] = {}
        self.hanging: set[str] = set()

    async def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.hanging:
            await asyncio.Event().wait()
        if name in self.failing:
            raise self.failing[name]

    async def join(self, init_info: dict[str, Any]) -> None:
        await self._note("join", init_info)

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
            self.version = LOST
        return self.whole


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def member(engine: FakeEngine) -> WeightMember:
    return WeightMember(engine, "me", host="10.0.0.2")  # type: ignore[arg-type]


def prepare(epoch: int, **ranks: int) -> dict[str, Any]:
    ranks = ranks or {"me": 3, "other": 1}
    message = pb.Prepare(
        epoch=epoch,
        senders=[pb.Rendezvous(address="10.0.0.1", port=4000)],
        world_size=5,
        ranks=ranks,
        in_flight="keep",
        bucket_bytes=64,
        stall_s=7,
    )
    return {"prepare": message}


def transfer(epoch: int) -> dict[str, Any]:
    return {"transfer": pb.Transfer(epoch=epoch, manifest=MANIFEST.pack())}


def commit(epoch: int, version: int) -> dict[str, Any]:
    return {"commit": pb.Commit(epoch=epoch, policy_version=version)}


async def play(member: WeightMember, phase: dict[str, Any], timeout_s: float = 5) -> pb.WeightReport:
    return await member.carry_out(pb.WeightPhase(timeout_s=timeout_s, **phase))


def names(engine: FakeEngine) -> list[str]:
    return [call[0] for call in engine.calls]


def good(version: int, epoch: int, checksum: str = "") -> pb.WeightReport:
    return pb.WeightReport(replica="me", ok=True, policy_version=version, epoch=epoch, workers=2, checksum=checksum)


async def test_a_push_is_prepare_transfer_commit(engine: FakeEngine, member: WeightMember) -> None:
    assert await play(member, {"discover": pb.Discover()}) == good(3, 0)
    assert await play(member, prepare(1)) == good(3, 1)
    assert await play(member, transfer(1)) == good(3, 1, "new")
    assert await play(member, commit(1, 4)) == good(4, 1, "new")
    info = {
        "senders": [["10.0.0.1", 4000]],
        "rank_offset": 3,
        "world_size": 5,
        "epoch": 1,
        "host": "10.0.0.2",
        "stall_s": 7,
        "streaming": False,
    }
    assert engine.calls == [("join", info), ("pause", "keep"), ("receive", MANIFEST), ("commit", 4)]


async def test_the_group_of_an_epoch_is_joined_once(engine: FakeEngine, member: WeightMember) -> None:
    for version in (4, 5):
        for phase in (prepare(1), transfer(1), commit(1, version)):
            assert (await play(member, phase)).ok
    assert (await play(member, prepare(2))).epoch == 2
    assert names(engine) == ["join", "pause", "receive", "commit", "pause", "receive", "commit", "join", "pause"]


async def test_nccl_is_told_of_its_packing() -> None:
    engine = FakeEngine("nccl")
    await play(WeightMember(engine, "me", "10.0.0.2"), prepare(1))  # type: ignore[arg-type]
    assert engine.calls[0][1] == {
        "master_address": "10.0.0.1",
        "master_port": 4000,
        "rank_offset": 3,
        "world_size": 5,
        "packed": True,
        "packed_buffer_size_bytes": 64,
    }


async def test_a_replica_that_is_no_member_stays_out(engine: FakeEngine, member: WeightMember) -> None:
    report = await play(member, prepare(1, other=1))
    assert (report.ok, report.epoch, report.workers) == (False, 0, 2)
    assert report.error == "prepare: FailedPrecondition: me is no member of epoch 1"
    assert engine.calls == []


@pytest.mark.parametrize("phase", [transfer(2), commit(2, 4)])
async def test_phases_of_another_epoch_are_refused(
    engine: FakeEngine, member: WeightMember, phase: dict[str, Any]
) -> None:
    report = await play(member, phase)
    assert not report.ok
    assert "FailedPrecondition: epoch 2 is not open here; this replica is in 0" in report.error
    await play(member, prepare(1))
    assert "epoch 2 is not open here; this replica is in 1" in (await play(member, phase)).error
    assert engine.version == 3


async def test_after_a_commit_nothing_is_open(engine: FakeEngine, member: WeightMember) -> None:
    for phase in (prepare(1), transfer(1), commit(1, 4)):
        await play(member, phase)
    assert "epoch 1 is not open here" in (await play(member, commit(1, 5))).error
    assert engine.version == 4
    assert "abort" not in names(engine)


@pytest.mark.parametrize(
    ("where", "phase", "aborts"),
    [("join", "prepare", 0), ("pause", "prepare", 1), ("receive", "transfer", 1), ("commit", "commit", 1)],
)
async def test_a_phase_that_fails_is_rolled_back_and_the_next_push_joins_anew(
    engine: FakeEngine, member: WeightMember, where: str, phase: str, aborts: int
) -> None:
    engine.failing[where] = RuntimeError("broken pipe")
    reports = {}
    for step in (prepare(1), transfer(1), commit(1, 4)):
        reports[next(iter(step))] = await play(member, step)
    failed = reports[phase]
    assert (failed.ok, failed.error) == (False, f"{phase}: RuntimeError: broken pipe")
    assert (failed.policy_version, failed.epoch) == (3, 0)
    assert names(engine).count("abort") == aborts
    engine.failing.clear()
    engine.calls.clear()
    for step in (prepare(2), transfer(2), commit(2, 4)):
        assert (await play(member, step)).ok
    assert names(engine) == ["join", "pause", "receive", "commit"]


async def test_a_phase_that_hangs_ends_at_its_deadline(engine: FakeEngine, member: WeightMember) -> None:
    await play(member, prepare(1))
    engine.hanging.add("receive")
    report = await play(member, transfer(1), timeout_s=0.05)
    assert (report.ok, report.error) == (False, "transfer: TimeoutError: ")
    assert names(engine) == ["join", "pause", "receive", "abort"]


async def test_a_roll_back_that_fails_or_hangs_is_reported_like_any_failure(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1))
    engine.failing = {"receive": RuntimeError("broken pipe"), "abort": RuntimeError("dead")}
    report = await play(member, transfer(1))
    assert (report.ok, report.error) == (False, "transfer: RuntimeError: broken pipe")
    engine.hanging.add("abort")
    report = await play(member, {"abort": pb.Abort(epoch=1)}, timeout_s=0.05)
    assert (report.ok, report.error) == (False, "abort: TimeoutError: ")
    assert member.failure == "paused by a push that could not be rolled back: TimeoutError: "
    found = await play(member, {"discover": pb.Discover()})
    assert (found.ok, found.error) == (False, member.failure)
    # It stays open until an abort succeeds, so that the engine is not left paused for ever.
    engine.hanging.clear()
    engine.failing.clear()
    assert await play(member, {"abort": pb.Abort(epoch=1)}) == good(3, 0)
    assert names(engine).count("abort") == 4
    assert member.failure == ""


async def test_a_push_whose_orchestrator_falls_silent_is_rolled_back(
    engine: FakeEngine, member: WeightMember
) -> None:
    """After two deadlines of 0.05 s without a further phase; a phase in time puts that off."""
    await play(member, prepare(1), timeout_s=0.05)
    await play(member, transfer(1), timeout_s=10)
    await asyncio.sleep(0.2)
    assert "abort" not in names(engine)
    await play(member, transfer(1), timeout_s=0.05)
    await asyncio.sleep(0.2)
    assert names(engine)[-1] == "abort"
    assert await play(member, {"discover": pb.Discover()}) == good(3, 0)


async def test_aborting_what_was_never_prepared_does_nothing(engine: FakeEngine, member: WeightMember) -> None:
    assert await play(member, {"abort": pb.Abort(epoch=9)}) == good(3, 0)
    assert engine.calls == []


async def test_long_errors_are_cut(engine: FakeEngine, member: WeightMember) -> None:
    engine.failing["join"] = RuntimeError("x" * 5000)
    assert len((await play(member, prepare(1))).error) == 1000


async def test_an_abort_waits_for_the_phase_that_it_overtakes(engine: FakeEngine, member: WeightMember) -> None:
    """A transfer that its caller has given up is still failing here: two roll-backs at once would cross."""
    await play(member, prepare(1))
    engine.hanging.add("receive")
    lost = asyncio.create_task(play(member, transfer(1), timeout_s=0.2))
    await asyncio.sleep(0.05)
    assert member.busy
    report = await play(member, {"abort": pb.Abort(epoch=1)})
    assert (await lost).error == "transfer: TimeoutError: "
    assert report == good(3, 0)
    assert names(engine) == ["join", "pause", "receive", "abort"]
    assert not member.busy


async def test_asking_who_is_there_neither_waits_nor_changes_anything(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1))
    engine.hanging.add("receive")
    slow = asyncio.create_task(play(member, transfer(1), timeout_s=0.3))
    await asyncio.sleep(0.05)
    assert await play(member, {"discover": pb.Discover()}, timeout_s=0.05) == good(3, 1)
    assert "abort" not in names(engine)
    await slow


async def test_a_replica_whose_weights_are_lost_says_so_until_a_push_brings_whole_ones(
    engine: FakeEngine, member: WeightMember
) -> None:
    engine.whole = False
    engine.failing["receive"] = RuntimeError("connection reset")
    await play(member, prepare(1))
    report = await play(member, transfer(1))
    assert (report.ok, report.policy_version) == (False, LOST)
    assert member.failure == "a push that loads weights into place broke off; this replica waits for a whole one"
    assert (await play(member, {"abort": pb.Abort(epoch=1)})).policy_version == LOST
    assert member.failure
    engine.failing.clear()
    for step in (prepare(2), transfer(2), commit(2, 4)):
        assert (await play(member, step)).ok
    assert (engine.version, member.failure) == (4, "")
