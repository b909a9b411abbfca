"""A replica rolls a push back when a phase fails or hangs, or its caller falls silent."""

import asyncio

import pytest

from protos import rollout_pb2 as pb
from services.rollout.member import WeightMember
from tests.unit.member_phases import FakeEngine, good, names, play, prepare, transfer
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled, until


async def test_a_roll_back_that_fails_or_hangs_is_reported_like_any_failure(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1, stall_s=0.05))
    engine.failing = {"receive": RuntimeError("broken pipe"), "abort": RuntimeError("dead")}
    report = await play(member, transfer(1))
    assert (report.ok, report.error) == (False, "transfer: RuntimeError: broken pipe")
    engine.hanging.add("abort")
    report = await play(member, {"abort": pb.Abort(membership=1)}, timeout_s=0.05)
    assert (report.ok, report.error) == (False, "abort: TimeoutError: ")
    assert member.failure == "paused by a push that could not be rolled back: TimeoutError: "
    actual = await play(member, {"discover": pb.Discover()})
    assert (actual.ok, actual.error) == (False, member.failure)
    # It stays open until an abort succeeds, so that the engine is not left paused for ever.
    engine.hanging.clear()
    engine.failing.clear()
    assert await play(member, {"abort": pb.Abort(membership=1)}) == good(3, 0)
    assert names(engine).count("abort") == 4
    assert member.failure == ""


async def test_an_engine_that_is_stuck_in_a_broken_transfer_has_its_time_before_it_counts_as_ill(
    engine: FakeEngine, member: WeightMember
) -> None:
    """The abort's own deadline of 0.05 s is shorter than the 5 s for which the engine may wait for a bucket."""
    await play(member, prepare(1, stall_s=5))
    engine.hanging.add("abort")
    aborting = asyncio.create_task(play(member, {"abort": pb.Abort(membership=1)}, timeout_s=0.05))
    # The phase's own, and the roll-back's after its deadline.
    await until(lambda: names(engine).count("abort") == 2)
    report = await play(member, {"discover": pb.Discover()})
    assert (report.ok, report.error) == (False, "a push that failed is still being rolled back")
    assert (member.failure, member.busy) == ("", True)
    engine.free.set()
    assert (await aborting).error == "abort: TimeoutError: "
    assert await play(member, {"discover": pb.Discover()}) == good(3, 0)
    assert member.failure == ""


@in_virtual_time
async def test_a_phase_whose_caller_is_gone_is_still_rolled_back_when_it_fails(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1))
    engine.hanging.add("receive")
    lost = asyncio.create_task(play(member, transfer(1), timeout_s=5))
    await until(lambda: "receive" in names(engine))
    lost.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lost
    await asyncio.sleep(4)
    assert (member.busy, "abort" in names(engine)) == (True, False)
    await asyncio.sleep(2)
    assert (member.busy, "abort" in names(engine)) == (False, True)
    assert await play(member, {"abort": pb.Abort(membership=1)}) == good(3, 0)


@in_virtual_time
async def test_a_push_whose_orchestrator_falls_silent_is_rolled_back(
    engine: FakeEngine, member: WeightMember
) -> None:
    """After two deadlines of 5 s without a further phase; a phase in time puts that off."""
    await play(member, prepare(1), timeout_s=5)
    await asyncio.sleep(9)
    await play(member, transfer(1), timeout_s=100)
    await asyncio.sleep(199)
    await play(member, transfer(1), timeout_s=5)
    await asyncio.sleep(9)
    assert "abort" not in names(engine)
    await asyncio.sleep(2)
    assert names(engine)[-1] == "abort"
    assert await play(member, {"discover": pb.Discover()}) == good(3, 0)


async def test_an_abort_waits_for_the_phase_that_it_overtakes(engine: FakeEngine, member: WeightMember) -> None:
    """A transfer that its caller has given up is still failing here: two roll-backs at once would cross."""
    await play(member, prepare(1))
    engine.hanging.add("receive")
    lost = asyncio.create_task(play(member, transfer(1)))
    await until(lambda: "receive" in names(engine))
    aborting = asyncio.create_task(play(member, {"abort": pb.Abort(membership=1)}))
    await settled()
    assert (member.busy, "abort" in names(engine)) == (True, False)
    engine.failing["receive"] = RuntimeError("connection reset")
    engine.free.set()
    assert (await lost).error == "transfer: RuntimeError: connection reset"
    assert await aborting == good(3, 0)
    assert names(engine) == ["join", "pause", "receive", "abort"]
    assert not member.busy


@in_virtual_time
async def test_a_late_roll_back_leaves_the_next_push_alone(engine: FakeEngine, member: WeightMember) -> None:
    """The caller of a transfer gave up; its abort waited in vain, and the next push's prepare is next in the turn."""
    await play(member, prepare(1))
    engine.hanging.add("receive")
    lost = asyncio.create_task(play(member, transfer(1), timeout_s=30))
    await until(lambda: "receive" in names(engine))
    following = asyncio.create_task(play(member, prepare(2), timeout_s=60))
    await asyncio.sleep(1)
    assert (await play(member, {"abort": pb.Abort(membership=1)}, timeout_s=2)).error == "abort: TimeoutError: "
    assert not (await lost).ok
    assert await following == good(3, 2)
    engine.hanging.clear()
    assert (await play(member, transfer(2), timeout_s=5)).ok
    # And nothing that waited for a further phase of the first push ends the second: 2 * 30 s later it is open.
    assert (await play(member, transfer(2), timeout_s=60)).ok
    await asyncio.sleep(100)
    assert names(engine) == ["join", "pause", "receive", "abort", "join", "pause", "receive"]


@in_virtual_time
async def test_a_phase_that_comes_during_a_roll_back_waits_for_its_end(
    engine: FakeEngine, member: WeightMember
) -> None:
    await play(member, prepare(1), timeout_s=5)
    engine.hanging.add("abort")
    await asyncio.sleep(10.5)
    assert names(engine)[-1] == "abort"
    following = asyncio.create_task(play(member, prepare(2), timeout_s=30))
    await asyncio.sleep(1)
    assert names(engine)[-1] == "abort"
    engine.hanging.clear()
    engine.free.set()
    assert await following == good(3, 2)
    assert names(engine) == ["join", "pause", "abort", "join", "pause"]
    assert (await play(member, {"discover": pb.Discover()})).ok


async def test_a_replica_whose_engine_stands_still_does_not_answer_the_abort(
    engine: FakeEngine, member: WeightMember
) -> None:
    """With nothing to roll back, as it had not opened the push yet, it was a member of every further attempt."""
    engine.hanging = {"check_health"}
    report = await play(member, {"abort": pb.Abort(membership=1)}, timeout_s=0.05)
    assert not report.ok
    engine.free.set()
    assert (await play(member, {"abort": pb.Abort(membership=1)})).ok
