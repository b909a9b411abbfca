"""Phases that a member refuses: of other runs, and of other weights than the model's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.serving.runs.timeline import Moment
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.sender import make_sender
from services.rollout.member import WeightMember
from tests.members import StagingEngine
from tests.unit.fake_cuda import FOLDER, FakeGpu
from tests.unit.member_phases import (
    LEASE,
    MANIFEST,
    NEWER,
    FakeEngine,
    claim,
    names,
    play,
    prepare,
    transfer,
)
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled, until


@pytest.mark.parametrize("lease", [common_pb2.Lease(), common_pb2.Lease(run_id="ours", number=3)])
async def test_a_phase_without_the_lease_is_refused(
    engine: FakeEngine, member: WeightMember, lease: common_pb2.Lease
) -> None:
    report = await member.carry_out(pb.WeightPhase(timeout_s=5, lease=lease, **prepare(1)))
    assert (report.ok, engine.calls) == (False, [])
    assert "lease: " in report.error


async def test_a_replica_that_was_never_claimed_takes_no_phase(engine: FakeEngine) -> None:
    fresh = WeightMember(engine, "me")  # type: ignore[arg-type]
    report = await fresh.carry_out(pb.WeightPhase(timeout_s=5, lease=LEASE, **prepare(1)))
    # Not fenced: its run only has to claim it.
    assert (report.ok, report.fenced, engine.calls) == (False, False, [])
    assert "run ours (lease 4) has not claimed this replica yet" in report.error


async def test_another_run_waits_for_the_lease_or_takes_it_over_and_an_open_push_is_rolled_back(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1))
    refused = await claim(member, NEWER)
    assert (refused.ok, refused.fenced) == (False, True)
    assert "run ours holds this service and is alive" in refused.error
    assert "abort" not in names(engine)
    assert (await claim(member, NEWER, take_over=True)).held.lease == NEWER
    assert names(engine)[-1] == "abort"
    late = await member.carry_out(pb.WeightPhase(timeout_s=5, lease=LEASE, **transfer(1)))
    assert (late.ok, late.fenced) == (False, True)
    assert (await member.carry_out(pb.WeightPhase(timeout_s=5, lease=NEWER, **prepare(2)))).ok


async def test_a_claim_is_answered_when_no_phase_of_another_run_is_being_carried_out(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1))
    engine.hanging.add("receive")
    ours = asyncio.create_task(member.carry_out(pb.WeightPhase(timeout_s=5, lease=LEASE, **transfer(1))))
    await until(lambda: "receive" in names(engine))
    asked = common_pb2.Claim(ttl_s=60, take_over=True)
    first = await member.carry_out(pb.WeightPhase(timeout_s=0.05, lease=NEWER, claim=asked))
    assert (first.ok, first.error) == (False, "claim: TimeoutError: ")
    # Asked again with the lease that counts already, it still waits.
    again = asyncio.create_task(claim(member, NEWER, take_over=True))
    await settled()
    assert not again.done()
    engine.failing["receive"] = RuntimeError("connection reset")
    engine.free.set()
    assert (await again).ok
    assert (await ours).error == "transfer: RuntimeError: connection reset"
    assert names(engine) == ["join", "pause", "receive", "abort"]


async def test_weights_that_are_not_the_models_are_refused_before_anything_moves(
    engine: FakeEngine, member: WeightMember
) -> None:
    wide = Manifest(("w",), ("float32",), ((3,),), 8)
    phase = prepare(1)
    phase["prepare"].manifest = wide.pack()
    report = await play(member, phase)
    assert (report.ok, report.error) == (False, "prepare: InvalidArgument: manifest: ((3,),)")
    actual = await play(member, {"discover": pb.Discover(manifest=wide.pack())})
    assert (actual.ok, actual.misfit) == (True, "manifest: ((3,),)")
    assert (await play(member, {"discover": pb.Discover(manifest=MANIFEST.pack())})).misfit == ""
    assert engine.calls == []
    # Nor what says at first that it fits.
    await play(member, prepare(1))
    assert (
        "manifest: ((3,),)"
        in (await play(member, {"transfer": pb.Transfer(membership=1, manifest=wide.pack())})).error
    )
    assert names(engine) == ["join", "pause", "abort"]


async def test_a_manifest_or_bucket_beyond_all_measure_is_refused(engine: FakeEngine, member: WeightMember) -> None:
    phase = prepare(1)
    phase["prepare"].manifest = b"x" * 101
    assert "manifest: 101 bytes; no push to this replica's model needs as many" in (await play(member, phase)).error
    phase = prepare(1)
    phase["prepare"].bucket_bytes = 1 << 40
    assert "bucket_bytes: 1099511627776; must be at most" in (await play(member, phase)).error
    assert engine.calls == []


async def test_weights_are_of_the_timeline_of_the_lease_that_brought_them(
    engine: FakeEngine, member: WeightMember
) -> None:
    """The run goes back from version 9 to 5: a claim changes no weights, and a push makes a lower version later."""
    assert member.at == Moment(0, 3)
    commits = [(LEASE, 9), (NEWER, 5)]
    for lease, version in commits:
        before = member.at
        assert (await claim(member, lease, take_over=True)).ok
        for phase in (prepare(version), transfer(version)):
            assert (await member.carry_out(pb.WeightPhase(timeout_s=5, lease=lease, **phase))).ok
            assert member.at == before
        commit = pb.Commit(membership=version, policy_version=version)
        report = await member.carry_out(pb.WeightPhase(timeout_s=5, lease=lease, commit=commit))
        assert member.at == Moment(lease.number, version) == Moment(report.timeline, report.policy_version)


async def committed(member: WeightMember) -> None:
    commit = {"commit": pb.Commit(membership=1, policy_version=4)}
    for phase in (prepare(1), transfer(1), commit):
        assert (await play(member, phase)).ok


@in_virtual_time
async def test_the_group_of_a_run_is_left_when_its_lease_is_over(engine: FakeEngine, member: WeightMember) -> None:
    """Until then the memory of its learner stays in use."""
    await claim(member, LEASE, ttl_s=20)
    await committed(member)
    for _ in range(8):  # renewed in time
        await asyncio.sleep(15)
        await claim(member, LEASE, ttl_s=20)
    assert "leave" not in names(engine)
    await asyncio.sleep(21)
    assert names(engine)[-1] == "leave"
    # The run was only slow: it finds that the replica has left, and forms a group with it again.
    assert (await play(member, {"discover": pb.Discover()})).membership == 0
    assert (await play(member, prepare(2))).ok
    assert names(engine)[-3:] == ["leave", "join", "pause"]


async def test_the_last_proof_comes_with_any_phase_and_goes_with_its_run(member: WeightMember) -> None:
    first, second = (pb.Proof(policy_version=version, difference=1e-5) for version in (1, 2))
    renewed = pb.WeightPhase(timeout_s=5, lease=LEASE, claim=common_pb2.Claim(ttl_s=60), proved=first)
    assert (await member.carry_out(renewed)).ok
    assert member.proved == first
    await play(member, {"proved": second, "abort": pb.Abort()})
    await play(member, {"discover": pb.Discover()})
    assert member.proved == second
    forged = pb.WeightPhase(timeout_s=5, lease=NEWER, abort=pb.Abort(), proved=first)
    assert not (await member.carry_out(forged)).ok
    assert member.proved == second
    assert (await claim(member, NEWER, take_over=True)).ok
    assert member.proved is None


async def test_the_group_of_a_run_is_left_at_its_end_and_at_the_claim_of_another(
    engine: FakeEngine, member: WeightMember
) -> None:
    await committed(member)
    await claim(member, LEASE, ttl_s=0)
    await until(lambda: names(engine)[-1] == "leave")
    await claim(member, LEASE)
    await committed(member)
    assert (await claim(member, NEWER, take_over=True)).ok
    assert names(engine)[-1] == "leave"
    # Nothing is left twice.
    await claim(member, NEWER, ttl_s=0)
    await settled()
    assert names(engine).count("leave") == 2


async def test_an_open_push_is_not_left_when_the_lease_is_over(engine: FakeEngine, member: WeightMember) -> None:
    await play(member, prepare(1))
    await claim(member, LEASE, ttl_s=0)
    await settled()
    assert "leave" not in names(engine)
    assert (await play(member, transfer(1))).ok


async def test_an_engine_that_cannot_leave_is_told_and_the_replica_goes_on(
    engine: FakeEngine, member: WeightMember, logged: list[str]
) -> None:
    await committed(member)
    engine.failing = {"leave": RuntimeError("stuck")}
    await claim(member, LEASE, ttl_s=0)
    await until(lambda: bool(logged))
    assert logged == ["push: me did not leave the group of a run that is over: stuck"]
    assert (await play(member, {"discover": pb.Discover()})).membership == 0


async def test_the_learners_memory_is_closed_with_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    gpu, weights = FakeGpu(tmp_path), {"w": torch.arange(64.0)}
    manifest = Manifest.of(weights, bucket_bytes=64)
    sender = make_sender("cuda-ipc", manifest, host="127.0.0.1", stall_s=5, cuda=gpu.cuda)
    sender.load(weights.items(), 1)
    engine = StagingEngine("cuda-ipc", torch.device("cpu"), "me")
    member = WeightMember(engine, "me")  # type: ignore[arg-type]
    await claim(member, LEASE)
    meeting = pb.Prepare(
        membership=1,
        senders=[pb.Rendezvous(address="", port=sender.rendezvous())],
        world_size=2,
        ranks={"me": 1},
        in_flight="keep",
        bucket_bytes=64,
        stall_s=5,
        manifest=manifest.pack(),
        backend="cuda-ipc",
    )
    received: dict[str, Any] = {"transfer": pb.Transfer(membership=1, manifest=manifest.pack())}
    for phase in ({"prepare": meeting}, received, {"commit": pb.Commit(membership=1, policy_version=1)}):
        assert (await play(member, phase)).ok
    receiver: Any = engine._receiver
    [opened] = receiver._shared._opened
    assert len(opened.data) > 0
    await claim(member, LEASE, ttl_s=0)
    await until(lambda: not len(opened.data))
    assert torch.equal(engine._model["w"], weights["w"])
    sender.close()
    assert gpu.mapped == 0
