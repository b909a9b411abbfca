"""A replica that rests while the learners compute, and what ends that."""

import asyncio
import math

import pytest

from protos import rollout_pb2 as pb
from services.rollout.member import WeightMember
from tests.unit.member_phases import NEWER, FakeEngine, claim, names, play, prepare, transfer


def rest(at_most_s: float = 60) -> dict[str, pb.Rest]:
    return {"rest": pb.Rest(at_most_s=at_most_s)}


async def test_a_push_ends_it(engine: FakeEngine, member: WeightMember) -> None:
    assert (await play(member, rest())).ok
    for phase in (prepare(1), transfer(1), {"commit": pb.Commit(membership=1, policy_version=4)}):
        assert (await play(member, phase)).ok
    assert names(engine) == ["rest", "join", "pause", "receive", "commit"]
    # Nothing is left that an abort would have to end, but the group.
    await play(member, {"abort": pb.Abort()})
    assert names(engine)[-2:] == ["commit", "leave"]
    assert engine.version == 4


async def test_an_abort_ends_it(engine: FakeEngine, member: WeightMember) -> None:
    await play(member, rest())
    assert (await play(member, {"abort": pb.Abort()})).ok
    assert names(engine) == ["rest", "abort"]


async def test_a_run_that_says_nothing_more_ends_it(engine: FakeEngine, member: WeightMember) -> None:
    """After the time that it asked for, however short the phase's own deadline was."""
    await play(member, rest(at_most_s=0.05), timeout_s=60)
    async with asyncio.timeout(30):
        while names(engine) != ["rest", "abort"]:
            await asyncio.sleep(0.01)
    assert not member.failure


async def test_another_run_that_claims_the_replica_ends_it(engine: FakeEngine, member: WeightMember) -> None:
    await play(member, rest())
    assert (await claim(member, NEWER, take_over=True)).ok
    assert names(engine) == ["rest", "abort"]


async def test_one_that_fails_is_rolled_back(engine: FakeEngine, member: WeightMember) -> None:
    engine.failing["rest"] = RuntimeError("CUDA error")
    report = await play(member, rest())
    assert not report.ok
    assert "rest: RuntimeError: CUDA error" in report.error
    assert names(engine) == ["rest", "abort"]
    assert not member.failure


@pytest.mark.parametrize("at_most_s", [0, -1, math.nan, math.inf, 1e9])
async def test_it_has_an_end(engine: FakeEngine, member: WeightMember, at_most_s: float) -> None:
    report = await play(member, rest(at_most_s))
    assert "rest.at_most_s" in report.error
    assert "rest" not in names(engine)
