"""The push of weights to replicas that play their real part, on engines that only take notes."""

import time

from tests.unit.fake_fleet import PUSH, FakeSource, Fleet, make_pusher


async def test_a_push_brings_every_replica_to_the_version(source: FakeSource) -> None:
    fleet = Fleet(source, b=1, a=1)
    report = await make_pusher(fleet, in_flight="wait").push(7)
    assert fleet.versions == {"a": 7, "b": 7}
    assert fleet.phases == PUSH
    assert source.calls == [("rendezvous", "gloo"), "gather", ("join", 1, 3), "send"]
    for engine in fleet.engines.values():
        assert engine.calls == ["join", "pause wait", "receive", "commit"]
    assert (report.policy_version, report.replicas, report.attempts, report.checksum) == (7, ("a", "b"), 1, "sum")
    assert 0 < report.seconds < 60
    [joined] = fleet.engines["a"].joined
    assert joined.pop("until") <= time.time() + 4
    assert joined == {
        "senders": [["10.0.0.1", 4000]],
        "backend": "gloo",
        "rank": 1,
        "world_size": 3,
        "membership": 1,
        "stall_s": 4,
        "on_gpu": False,
    }


async def test_a_group_forms_within_its_own_time_unless_requests_finish_first(source: FakeSource) -> None:
    """Within the longest waits for one bucket and for an answer together; a transfer has its own time, 9 s here."""
    for settings, seconds in (
        ({"in_flight": "keep"}, 4 + 2),
        ({"in_flight": "wait"}, 9),
        ({"in_flight": "wait", "stall_s": 20}, 20 + 2),
    ):
        fleet = Fleet(source, a=1)
        await make_pusher(fleet, **settings).push(1)
        assert fleet.timeouts == [2, seconds, 9, 30]


async def test_the_group_stays_while_the_replicas_are_the_same(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    pusher = make_pusher(fleet)
    for version in (1, 2, 3):
        await pusher.push(version)
    assert source.calls[2:] == [("join", 1, 3), "send", "gather", "send", "gather", "send"]
    assert fleet.versions == {"a": 3, "b": 3}
    assert [engine.calls.count("join") for engine in fleet.engines.values()] == [1, 1]


async def test_a_replica_more_or_less_is_a_new_membership(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    await pusher.push(1)
    fleet.add(b=1)
    assert (await pusher.push(2)).replicas == ("a", "b")
    fleet.remove("a")
    assert (await pusher.push(3)).replicas == ("b",)
    assert [call for call in source.calls if call[0] == "join"] == [("join", 1, 2), ("join", 2, 3), ("join", 3, 2)]
    assert fleet.versions == {"b": 3}


async def test_a_replica_that_was_replaced_is_a_new_membership_at_the_same_size(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    await pusher.push(1)
    fleet.remove("a")
    fleet.add(b=1)
    await pusher.push(2)
    assert ("join", 2, 2) in source.calls
    assert fleet.versions == {"b": 2}


async def test_workers_of_a_replica_have_ranks_of_their_own(source: FakeSource) -> None:
    fleet = Fleet(source, c=1, a=2, b=4)
    await make_pusher(fleet).push(1)
    ranks = {name: engine.joined[0]["rank"] for name, engine in fleet.engines.items()}
    assert ranks == {"a": 1, "b": 3, "c": 7}
    assert ("join", 1, 8) in source.calls


async def test_replicas_of_an_earlier_run_form_a_new_group_at_once(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    await make_pusher(fleet).push(1)
    report = await make_pusher(fleet).push(2)
    assert report.attempts == 1
    assert fleet.engines["a"].calls.count("join") == 2
    assert source.calls[-2:] == [("join", 2, 2), "send"]


async def test_a_learners_memberships_never_share_a_number_though_all_replicas_have_left(source: FakeSource) -> None:
    """The store still has the addresses of those who met under the first: gloo would connect to them, in vain."""
    fleet = Fleet(source, a=1)
    async with make_pusher(fleet) as pusher:
        await pusher.push(1)
    assert [member._membership for member in fleet.members.values()] == [0]
    await make_pusher(fleet).push(2)
    assert [call for call in source.calls if call[0] == "join"] == [("join", 1, 2), ("join", 2, 2)]


async def test_at_the_end_of_a_run_the_replicas_leave_the_learners_group_before_it_ends(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    async with make_pusher(fleet) as pusher:
        await pusher.push(1)
        assert "leave" not in fleet.engines["a"].calls
    assert [engine.calls[-1] for engine in fleet.engines.values()] == ["leave", "leave"]
    assert (fleet.phases[-1], fleet.awaited[-1]) == ("abort", ["a", "b"])


async def test_without_a_push_there_is_no_group_to_leave(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    async with make_pusher(fleet):
        pass
    assert fleet.phases == []
