"""Newcomers get the weights: before the first push, between two, and while one waits for them."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from orchestrator.push.prover import Prover, PushDisproved
from orchestrator.push.pusher import PushFailed
from orchestrator.push.tolerance import Tolerance
from protos import rollout_pb2 as pb
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.registry import Applicant, Ticket
from quartet.wire.errors import Internal, LeaseLost, Unavailable
from tests.newcomers import nobody_looks
from tests.unit.fake_fleet import FakeSource, Fleet, make_pusher
from tests.unit.member_phases import MANIFEST
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled, until

HERE = Place("m")


class Lobby:
    """Notes what newcomers are told."""

    def __init__(self) -> None:
        self.told: dict[str, Ticket | None] = {}

    async def __call__(self, tickets: dict[str, Ticket | None]) -> None:
        self.told |= tickets


async def test_newcomers_are_let_in_while_a_push_waits_for_a_first_replica(source: FakeSource) -> None:
    """The push would wait for them, and they for it. They get what was pushed last, or come as they are."""
    fleet, lobby = Fleet(source, a=1), Lobby()
    pusher = make_pusher(fleet, patience_s=10)
    await pusher.push(1)
    fleet.remove("a")
    began = len(fleet.phases)
    pushing = asyncio.create_task(pusher.push(2))
    await until(lambda: fleet.phases[began:] == ["discover"])
    await settled()
    await pusher.add_newcomers({"new": Applicant(1, HERE)}, lobby, nobody_looks)
    ticket = lobby.told["new"]
    assert ticket is not None
    assert pb.Commit.FromString(ticket.commit).policy_version == 1
    fleet.add(new=1)
    assert (await pushing).replicas == ("new",)

    # Lost in the middle of a push: the source holds the weights of version 3 already.
    fleet.afterwards = {"transfer": lambda: fleet.remove("new")}
    pushing = asyncio.create_task(pusher.push(3))
    await until(lambda: fleet.phases[-2:] == ["abort", "discover"])
    await settled()
    await pusher.add_newcomers({"newer": Applicant(1, HERE)}, lobby, nobody_looks)
    assert lobby.told["newer"] is None
    fleet.add(newer=1)
    assert (await pushing).replicas == ("newer",)
    assert fleet.versions == {"newer": 3}

    # A push that waited once does not let in those that come while the next one is under way.
    staged = await pusher.stage(4)
    adding = asyncio.create_task(pusher.add_newcomers({"last": Applicant(1, HERE)}, lobby, nobody_looks))
    await settled()
    assert "last" not in lobby.told
    await pusher.deliver(staged)
    await adding
    ticket = lobby.told["last"]
    assert ticket is not None
    assert pb.Commit.FromString(ticket.commit).policy_version == 4


async def test_newcomers_before_the_first_push_begin_as_they_are(source: FakeSource) -> None:
    lobby = Lobby()
    await make_pusher(Fleet(source)).add_newcomers({"new": Applicant(1, HERE)}, lobby, nobody_looks)
    assert lobby.told == {"new": None}
    assert source.calls == []


async def test_newcomers_get_the_last_version_in_a_group_of_their_own(source: FakeSource) -> None:
    fleet, lobby = Fleet(source, a=1), Lobby()
    pusher = make_pusher(fleet)
    await pusher.push(7)
    await pusher.add_newcomers({"new": Applicant(2, HERE), "other": Applicant(1, HERE)}, lobby, nobody_looks)
    assert source.calls[-1] == ("add_newcomers", 2, 4)
    ticket = lobby.told["new"]
    assert ticket is not None
    assert lobby.told["other"] == ticket
    prepare = pb.Prepare.FromString(ticket.prepare)
    assert (prepare.membership, prepare.world_size, dict(prepare.ranks)) == (2, 4, {"new": 1, "other": 3})
    assert pb.Transfer.FromString(ticket.transfer).manifest == MANIFEST.pack()
    assert pb.Commit.FromString(ticket.commit).policy_version == 7
    assert ticket.checksum == "sum"
    # The group of the others is as it was.
    await pusher.push(8)
    assert source.calls[-2:] == ["gather", "send"]
    assert fleet.engines["a"].calls.count("join") == 1


async def test_a_push_and_newcomers_take_turns(source: FakeSource) -> None:
    fleet, lobby = Fleet(source, a=1), Lobby()
    pusher = make_pusher(fleet)
    await pusher.push(1)
    await asyncio.gather(pusher.push(2), pusher.add_newcomers({"new": Applicant(1, HERE)}, lobby, nobody_looks))
    ticket = lobby.told["new"]
    assert ticket is not None
    assert pb.Commit.FromString(ticket.commit).policy_version == 2


async def test_newcomers_that_come_while_weights_are_staged_get_these_after_the_delivery(source: FakeSource) -> None:
    """Without a ticket they would go into service with the weights of their model's files."""
    fleet, lobby = Fleet(source, a=1), Lobby()
    pusher = make_pusher(fleet)
    for version in (1, 2):  # the first push too, at whose beginning others still begin as they are
        staging = asyncio.create_task(pusher.stage(version))
        await until(lambda: pusher._turn.locked())
        newcomers = {f"new {version}": Applicant(1, HERE)}
        adding = asyncio.create_task(pusher.add_newcomers(newcomers, lobby, nobody_looks))
        staged = await staging
        await settled()
        assert f"new {version}" not in lobby.told
        await pusher.deliver(staged)
        await adding
        ticket = lobby.told[f"new {version}"]
        assert ticket is not None
        assert pb.Commit.FromString(ticket.commit).policy_version == version


async def test_newcomers_are_let_in_while_a_delivery_waits_for_a_first_replica(source: FakeSource) -> None:
    fleet, lobby = Fleet(source, a=1), Lobby()
    pusher = make_pusher(fleet, patience_s=10)
    await pusher.push(1)
    staged = await pusher.stage(2)
    adding = asyncio.create_task(pusher.add_newcomers({"new": Applicant(1, HERE)}, lobby, nobody_looks))
    await settled()
    assert lobby.told == {}
    fleet.remove("a")
    delivering = asyncio.create_task(pusher.deliver(staged))
    await adding
    assert lobby.told == {"new": None}
    fleet.add(new=1)
    assert (await delivering).replicas == ("new",)
    assert fleet.versions == {"new": 2}


async def test_newcomers_of_a_push_that_failed_wait_until_the_run_gives_it_up(source: FakeSource) -> None:
    fleet, lobby = Fleet(source, a=1), Lobby()
    pusher = make_pusher(fleet)
    await pusher.push(1)
    source.failures = [Internal("policy.send: the learner is gone")] * 3
    with pytest.raises(PushFailed):
        await pusher.push(2)
    adding = asyncio.create_task(pusher.add_newcomers({"new": Applicant(1, HERE)}, lobby, nobody_looks))
    await settled()
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert lobby.told == {}


async def test_a_learner_that_cannot_send_to_newcomers_costs_the_others_nothing(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    await pusher.push(1)
    source.failures = [Internal("policy.add_newcomers: the newcomer is gone")]
    with pytest.raises(Internal, match="the newcomer is gone"):
        await pusher.add_newcomers({"new": Applicant(1, HERE)}, Lobby(), nobody_looks)
    assert (await pusher.push(2)).attempts == 1


class Waiting(FakeSource):
    """A learner whose newcomers do not come, until it gives them up."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up = asyncio.Event()

    async def add_newcomers(self, membership: int, world_size: int) -> None:
        await self.given_up.wait()
        raise Internal(f"policy.add_newcomers: membership {membership} was given up by its sender")

    async def abandon(self, membership: int) -> None:
        await super().abandon(membership)
        self.given_up.set()


async def test_newcomers_of_which_one_has_died_are_given_up_and_the_next_push_begins() -> None:
    source, died = Waiting(), asyncio.Event()
    pusher = make_pusher(Fleet(source, a=1))
    await pusher.push(1)

    async def first_death(applicants: Mapping[str, Applicant]) -> str:
        await died.wait()
        return next(iter(applicants))

    applicants = {"new": Applicant(1, HERE), "newer": Applicant(1, HERE)}
    adding = asyncio.create_task(pusher.add_newcomers(applicants, Lobby(), first_death))
    pushing = asyncio.create_task(pusher.push(2))
    await settled()
    assert not pushing.done()
    died.set()
    with pytest.raises(Unavailable, match="new died while it joined"):
        await adding
    assert ("abandon", 2) in source.calls
    assert (await pushing).attempts == 1


@in_virtual_time
async def test_a_run_that_ends_while_newcomers_join_leaves_neither_the_sending_nor_the_watch_behind() -> None:
    source, watching = Waiting(), asyncio.Event()
    pusher = make_pusher(Fleet(source, a=1))
    await pusher.push(1)
    left: list[str] = []

    async def send(membership: int, world_size: int) -> None:
        try:
            await source.given_up.wait()
        finally:
            left.append("sending")

    async def first_death(applicants: Mapping[str, Applicant]) -> str:
        watching.set()
        try:
            return await asyncio.Future()
        finally:
            left.append("watch")

    source.add_newcomers = send  # type: ignore[method-assign]
    adding = asyncio.create_task(pusher.add_newcomers({"new": Applicant(1, HERE)}, Lobby(), first_death))
    await watching.wait()
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert sorted(left) == ["sending", "watch"]


@in_virtual_time
async def test_newcomers_whom_serve_names_after_the_last_push_get_its_version_at_the_end(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    await pusher.push(1)
    await pusher.add_newcomers({"new": Applicant(1, HERE)}, Lobby(), nobody_looks)
    assert (await pusher.push(2)).replicas == ("a",)
    completing = asyncio.create_task(pusher.complete())
    await asyncio.sleep(3)
    assert not completing.done()
    fleet.add(new=1)
    await completing
    assert fleet.versions == {"a": 2, "new": 2}


@in_virtual_time
async def test_the_end_waits_only_for_newcomers_that_are_behind_and_for_those_not_long(
    source: FakeSource, logged: list[str]
) -> None:
    fleet, loop = Fleet(source, a=1), asyncio.get_running_loop()
    pusher = make_pusher(fleet)
    await pusher.push(1)
    await pusher.add_newcomers({"new": Applicant(1, HERE)}, Lobby(), nobody_looks)
    phases, began = len(fleet.phases), loop.time()
    await pusher.complete()  # it joined at the last version
    assert (len(fleet.phases), loop.time()) == (phases, began)
    await pusher.push(2)
    await pusher.complete()  # it has died
    assert loop.time() - began == pytest.approx(10, abs=1)
    assert fleet.versions == {"a": 2}
    assert [line for line in logged if "(new)" in line]


async def test_a_finished_run_hears_that_it_has_lost_its_replicas_or_that_one_computes_with_other_weights(
    source: FakeSource,
) -> None:
    fleet = Fleet(source, a=1)
    prover = Prover(source, [np.asarray([1, 2, 3], np.int32)], Tolerance(0.01, 0.01), every=5)
    pusher = make_pusher(fleet, prover=prover)
    await pusher.push(1)
    pusher.joined(["new"])
    fleet.add(new=1)
    fleet.engines["new"].off_by = 0.25
    with pytest.raises(PushDisproved, match=r"^version 1: new computes with other weights"):
        await pusher.complete()

    async def fenced(*_: object, **__: object) -> list[pb.WeightReport]:
        raise LeaseLost("lease: another run holds the replicas")

    fleet.update_weights = fenced  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        await pusher.complete()


@in_virtual_time
async def test_a_newcomer_that_does_not_take_the_last_version_costs_a_finished_run_nothing(
    source: FakeSource, logged: list[str]
) -> None:
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    pusher.joined(["new"])
    await pusher.push(1)
    fleet.add(new=1)
    source.failures = [Internal("policy.send: the learner is gone")] * 9
    await pusher.complete()
    assert fleet.versions["a"] == 1
    assert any("(new)" in line and "the learner is gone" in line for line in logged)
    source.failures = []
    await pusher.complete()
    assert fleet.versions == {"a": 1, "new": 1}
