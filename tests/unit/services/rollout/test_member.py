"""A replica's part in a push: phases in order, failures rolled back, reports that say what happened."""

import asyncio
import time
from typing import Any

import pytest

from protos import rollout_pb2 as pb
from services.rollout.interface import NO_VERSION
from services.rollout.member import WeightMember
from tests.unit.member_phases import (
    MANIFEST,
    OLDER,
    FakeEngine,
    good,
    held,
    names,
    play,
    prepare,
    transfer,
)
from tests.unit.waiting import settled, until


def commit(membership: int, version: int) -> dict[str, Any]:
    return {"commit": pb.Commit(membership=membership, policy_version=version)}


async def test_a_push_is_prepare_transfer_commit(engine: FakeEngine, member: WeightMember) -> None:
    assert await play(member, {"discover": pb.Discover()}) == good(3, 0)
    before = time.monotonic()
    assert await play(member, prepare(1)) == good(3, 1)
    assert await play(member, transfer(1)) == good(3, 1, "new")
    assert await play(member, commit(1, 4)) == good(4, 1, "new", timeline=4)
    info = {
        "senders": [["10.0.0.1", 4000]],
        "backend": "gloo",
        "rank": 3,
        "world_size": 5,
        "membership": 1,
        "stall_s": 7,
        "on_gpu": False,
    }
    # The learner waits for stall_s too; later than that it is not there to join.
    assert before + 7 <= engine.calls[0][1].pop("until") <= time.monotonic() + 7
    assert engine.calls == [("join", info), ("pause", "keep"), ("receive", MANIFEST), ("commit", 4)]


async def test_the_group_of_a_membership_is_joined_once(engine: FakeEngine, member: WeightMember) -> None:
    for version in (4, 5):
        for phase in (prepare(1), transfer(1), commit(1, version)):
            assert (await play(member, phase)).ok
    assert (await play(member, prepare(2))).membership == 2
    assert names(engine) == ["join", "pause", "receive", "commit", "pause", "receive", "commit", "join", "pause"]


async def test_a_replica_that_was_started_for_another_backend_takes_no_part() -> None:
    engine = FakeEngine("nccl")
    report = await play(await held(engine), prepare(1))
    assert report.error == "prepare: FailedPrecondition: weight_backend: nccl here, but weights are pushed by gloo"
    assert engine.calls == []


async def test_a_replica_that_is_not_a_member_stays_out(engine: FakeEngine, member: WeightMember) -> None:
    report = await play(member, prepare(1, other=1))
    assert (report.ok, report.membership, report.workers) == (False, 0, 2)
    assert report.error == "prepare: FailedPrecondition: me is not in membership 1"
    assert engine.calls == []


@pytest.mark.parametrize("phase", [transfer(2), commit(2, 4)])
async def test_phases_of_another_membership_are_refused(
    engine: FakeEngine, member: WeightMember, phase: dict[str, Any]
) -> None:
    report = await play(member, phase)
    assert not report.ok
    assert "FailedPrecondition: membership 2 is not open here; this replica is in 0" in report.error
    await play(member, prepare(1))
    assert "membership 2 is not open here; this replica is in 1" in (await play(member, phase)).error
    assert engine.version == 3


async def test_after_a_commit_nothing_is_open(engine: FakeEngine, member: WeightMember) -> None:
    for phase in (prepare(1), transfer(1), commit(1, 4)):
        await play(member, phase)
    assert "membership 1 is not open here" in (await play(member, commit(1, 5))).error
    assert engine.version == 4
    assert "abort" not in names(engine)


async def test_a_phase_that_serve_repeats_is_carried_out_once(engine: FakeEngine, member: WeightMember) -> None:
    for version in (4, 5):
        for phase in (prepare(1), transfer(1), commit(1, version)):
            first, second = await asyncio.gather(play(member, phase), play(member, phase))
            assert first.ok
            assert first == second
    assert names(engine) == ["join", "pause", "receive", "commit", "pause", "receive", "commit"]
    # What was rolled back is not there any more.
    await play(member, prepare(1))
    await play(member, {"abort": pb.Abort(membership=1)})
    assert (await play(member, prepare(1))).ok
    assert names(engine)[-4:] == ["pause", "abort", "join", "pause"]


async def test_a_push_that_was_left_open_is_closed_by_the_next(engine: FakeEngine, member: WeightMember) -> None:
    await play(member, prepare(1))
    await play(member, transfer(1))
    for phase in (prepare(2), transfer(2), commit(2, 4)):
        assert (await play(member, phase)).ok
    assert names(engine) == ["join", "pause", "receive", "abort", "join", "pause", "receive", "commit"]


@pytest.mark.parametrize(
    ("where", "phase", "aborts"),
    [("join", "prepare", 0), ("pause", "prepare", 1), ("receive", "transfer", 1), ("commit", "commit", 1)],
)
async def test_a_phase_that_fails_is_rolled_back_and_the_next_push_joins_again(
    engine: FakeEngine, member: WeightMember, where: str, phase: str, aborts: int
) -> None:
    engine.failing[where] = RuntimeError("broken pipe")
    reports = {}
    for step in (prepare(1), transfer(1), commit(1, 4)):
        reports[next(iter(step))] = await play(member, step)
    failed = reports[phase]
    assert (failed.ok, failed.error) == (False, f"{phase}: RuntimeError: broken pipe")
    assert (failed.policy_version, failed.membership) == (3, 0)
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


async def test_aborting_what_was_never_prepared_does_nothing(engine: FakeEngine, member: WeightMember) -> None:
    assert await play(member, {"abort": pb.Abort(membership=9)}) == good(3, 0)
    assert engine.calls == []


async def test_long_errors_are_cut(engine: FakeEngine, member: WeightMember) -> None:
    engine.failing["join"] = RuntimeError("x" * 5000)
    assert len((await play(member, prepare(1))).error) == 1000


async def test_asking_who_is_there_neither_waits_nor_changes_anything(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1))
    engine.hanging.add("receive")
    slow = asyncio.create_task(play(member, transfer(1)))
    await until(lambda: "receive" in names(engine))
    assert await play(member, {"discover": pb.Discover()}) == good(3, 1)
    await settled()
    assert (member.busy, names(engine)) == (True, ["join", "pause", "receive"])
    engine.free.set()
    assert (await slow).ok


async def test_a_replica_whose_weights_are_lost_says_so_until_a_push_brings_whole_ones(
    engine: FakeEngine, member: WeightMember
) -> None:
    engine.whole = False
    engine.failing["receive"] = RuntimeError("connection reset")
    await play(member, prepare(1))
    report = await play(member, transfer(1))
    assert (report.ok, report.policy_version) == (False, NO_VERSION)
    assert member.failure == "a push that loads weights into place failed; this replica waits for a complete one"
    assert (await play(member, {"abort": pb.Abort(membership=1)})).policy_version == NO_VERSION
    assert member.failure
    engine.failing.clear()
    for step in (prepare(2), transfer(2), commit(2, 4)):
        assert (await play(member, step)).ok
    assert (engine.version, member.failure) == (4, "")


@pytest.mark.parametrize("phase", [prepare(2), transfer(1), commit(1, 9), {"abort": pb.Abort(membership=1)}], ids=str)
async def test_a_late_phase_of_an_older_run_changes_nothing_and_is_told_why(
    engine: FakeEngine, member: WeightMember, phase: dict[str, Any]
) -> None:
    await play(member, prepare(1))
    before = list(engine.calls)
    report = await member.carry_out(pb.WeightPhase(timeout_s=5, lease=OLDER, **phase))
    assert (report.ok, report.fenced) == (False, True)
    assert "run older (lease 3) no longer holds this service: run ours (lease 4) does; nothing" in report.error
    assert engine.calls == before
    # Ours goes on as if nothing had been.
    assert (await play(member, transfer(1))).ok
    assert (await play(member, commit(1, 4))).policy_version == 4


async def test_a_replica_whose_engine_stands_still_takes_no_part(engine: FakeEngine, member: WeightMember) -> None:
    """Prepare would wait for it until that phase's deadline."""
    engine.hanging = {"check_health"}
    report = await play(member, {"discover": pb.Discover()}, timeout_s=0.05)
    assert not report.ok
    assert report.error.startswith("its engine does not answer: TimeoutError")
    engine.free.set()
    assert (await play(member, {"discover": pb.Discover()})).ok
