"""Pushes in which a replica or the learner fails: repeated with those that are left, or failed with the reason."""

import asyncio
from typing import Any

import pytest

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.pusher import PushFailed, WeightPusher
from orchestrator.push.replicas import Misfit
from quartet.weight_transfer.place import Place
from quartet.wire.errors import Internal, LeaseLost, ServiceError, Unavailable
from tests.unit.fake_fleet import PUSH, FakeSource, Fleet, make_pusher
from tests.unit.waiting import settled, until


async def test_a_replica_that_dies_is_left_out_of_the_next_attempt(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    fleet.afterwards = {"discover": lambda: fleet.remove("b")}
    report = await make_pusher(fleet).push(5)
    assert (report.attempts, report.replicas) == (2, ("a",))
    assert fleet.phases == ["discover", "prepare", "abort", *PUSH[1:]]
    assert fleet.versions == {"a": 5}


async def test_a_replica_that_comes_too_late_for_the_membership_is_in_the_next_push(source: FakeSource) -> None:
    """The others lose nothing. Until then it holds an older version, and min_version keeps requests away."""
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet)
    fleet.afterwards = {"discover": lambda: fleet.add(b=1)}
    report = await pusher.push(5)
    assert (report.attempts, report.replicas) == (1, ("a",))
    assert fleet.versions == {"a": 5, "b": 0}
    assert (await pusher.push(6)).replicas == ("a", "b")
    assert fleet.versions == {"a": 6, "b": 6}


async def test_a_replica_that_stays_silent_fails_the_push_and_is_named(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    fleet.mute = {("b", "transfer")}
    with pytest.raises(PushFailed, match=r"^version 5 after 2 attempts: b: did not answer transfer$"):
        await make_pusher(fleet, attempts=2).push(5)
    assert fleet.phases == ["discover", "prepare", "transfer", "abort", "prepare", "transfer", "abort"]
    assert fleet.versions == {"a": 0, "b": 0}
    assert fleet.engines["a"].calls[-1] == "abort"
    # Nothing is left of the failed push.
    fleet.mute = set()
    assert (await make_pusher(fleet).push(6)).attempts == 1
    assert fleet.versions == {"a": 6, "b": 6}


async def test_other_bytes_than_were_sent_are_never_committed(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    fleet.engines["b"].garbles = True
    with pytest.raises(PushFailed, match=r"replicas \['b'\] received other bytes than were sent"):
        await make_pusher(fleet, attempts=1).push(5)
    assert fleet.phases == ["discover", "prepare", "transfer", "abort"]
    assert fleet.versions == {"a": 0, "b": 0}
    for engine in fleet.engines.values():
        assert engine.calls[-1] == "abort"


async def test_a_learner_that_fails_once_costs_an_attempt(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    source.failures = [Internal("policy.send: broken pipe")]
    report = await make_pusher(fleet).push(5)
    assert report.attempts == 2
    assert fleet.versions == {"a": 5}
    assert ("join", 2, 2) in source.calls


async def test_when_both_sides_fail_the_replicas_reason_is_told(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    fleet.mute = {("a", "transfer")}
    source.failures = [Internal("policy.send: broken pipe")]
    with pytest.raises(PushFailed, match="a: did not answer transfer"):
        await make_pusher(fleet, attempts=1).push(5)


async def test_a_learner_that_is_gone_ends_the_push_at_once(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    source.failures = [ValueError("the learner's process is gone")]
    with pytest.raises(ValueError, match="process is gone"):
        await make_pusher(fleet).push(5)
    assert source.calls.count("send") == 1


async def test_a_push_without_replicas_fails(source: FakeSource) -> None:
    """An error after weights.patience_s, which is 0.1 s here."""
    with pytest.raises(Unavailable, match=r"^no rollout replica answers$"):
        await make_pusher(Fleet(source)).push(5)
    assert "send" not in source.calls
    assert issubclass(PushFailed, ServiceError)


async def test_replicas_that_cannot_take_weights_are_named(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    fleet.members["a"]._stuck = True
    expected = r"^no rollout replica can take weights: a: a push that failed is still being rolled back$"
    with pytest.raises(Unavailable, match=expected):
        await make_pusher(fleet).push(5)


async def test_a_push_that_reaches_no_replica_fails_and_the_next_pusher_chooses_again(source: FakeSource) -> None:
    """The only replica is replaced on another machine in the middle."""
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, "auto")
    await pusher.push(1)

    def move() -> None:
        fleet.remove("a")
        fleet.add(b=1)
        fleet.engines["b"].place = Place("n")

    fleet.afterwards["prepare"] = move
    expected = r"^version 2 after 3 attempts: ipc reaches none of the rollout replicas that answer$"
    with pytest.raises(PushFailed, match=expected):
        await pusher.push(2)
    assert fleet.versions == {"b": 0}
    await make_pusher(fleet, "auto").push(2)
    assert (fleet.versions, source.calls[-4]) == ({"b": 2}, ("rendezvous", "gloo"))


async def test_the_only_replica_is_waited_for_while_it_is_replaced(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, patience_s=10)
    await pusher.push(1)
    fleet.remove("a")
    asyncio.get_running_loop().call_later(0.3, lambda: fleet.add(b=1))
    report = await pusher.push(2)
    assert (report.attempts, report.replicas) == (1, ("b",))


async def test_a_silent_replica_is_out_of_the_membership_that_follows(source: FakeSource) -> None:
    """b is stopped during the transfer: it does not answer the roll-back either."""
    fleet = Fleet(source, a=1, b=1)
    fleet.mute = {("b", "transfer"), ("b", "abort")}
    report = await make_pusher(fleet).push(5)
    assert (report.attempts, report.replicas) == (2, ("a",))
    assert fleet.phases == ["discover", "prepare", "transfer", "abort", *PUSH[1:]]
    assert ("join", 2, 2) in source.calls


async def test_a_replica_that_cannot_roll_back_is_not_a_member(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    fleet.members["b"]._stuck = True
    report = await make_pusher(fleet).push(1)
    assert (report.attempts, report.replicas) == (1, ("a",))


async def test_a_call_that_fails_as_a_whole_is_tried_again(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)
    fleet.down = ["commit"]
    report = await make_pusher(fleet).push(5)
    assert report.attempts == 2
    assert fleet.phases == [*PUSH, "abort", *PUSH[1:]]
    assert fleet.versions == {"a": 5}


async def test_a_run_that_loses_its_replicas_amid_a_push_tries_it_once(source: FakeSource) -> None:
    """No replica is rolled back, as another run holds them."""
    fleet = Fleet(source, a=1)
    ask = fleet.update_weights

    async def fenced(*args: Any, **phase: Any) -> Any:
        if "transfer" in phase:
            raise LeaseLost("lease: another run holds the replicas")
        return await ask(*args, **phase)

    fleet.update_weights = fenced  # type: ignore[method-assign]
    with pytest.raises(LeaseLost, match="another run holds the replicas"):
        await make_pusher(fleet).push(5)
    assert fleet.phases == ["discover", "prepare"]


async def test_a_roll_back_that_fails_as_a_whole_leaves_the_next_attempt_to_those_that_answer(
    source: FakeSource,
) -> None:
    fleet = Fleet(source, a=1)
    fleet.down = ["transfer", "abort"]
    report = await make_pusher(fleet).push(5)
    assert (report.attempts, fleet.versions) == (2, {"a": 5})
    assert fleet.phases == ["discover", "prepare", "transfer", "abort", *PUSH]


@pytest.mark.parametrize(("backend", "first"), [("gloo", "prepare"), ("ipc", "gather"), ("cuda-ipc", "gather")])
async def test_gloo_gathers_beside_the_push_and_shared_memory_is_filled_before_it(
    source: FakeSource, backend: str, first: str
) -> None:
    source.at = [Place("m", ("GPU-0",))]
    fleet = Fleet(source, a=1)
    fleet.engines["a"].place = source.at[0]
    order: list[str] = []
    prepared = asyncio.Event()
    gather, ask = source.gather, fleet.update_weights

    async def gathering(push: int) -> None:
        if first == "prepare":
            await prepared.wait()
        for _ in range(100):  # turns in which a push that does not wait would prepare
            await asyncio.sleep(0)
        order.append("gather")
        await gather(push)

    async def asking(*args: Any, **phase: Any) -> Any:
        if "prepare" in phase:
            order.append("prepare")
            prepared.set()
        return await ask(*args, **phase)

    source.gather, fleet.update_weights = gathering, asking  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await WeightPusher(fleet, source, backend, WeightsConfig()).push(1)  # type: ignore[arg-type]
    assert order[0] == first


async def test_weights_that_cannot_be_gathered_are_the_reason_and_no_attempt_is_repeated(source: FakeSource) -> None:
    fleet = Fleet(source, a=1)

    async def gather(push: int) -> None:
        raise Internal("policy.gather: rank 1: out of memory")

    source.gather = gather  # type: ignore[method-assign]
    source.failures = [Internal("bucket 0 was not gathered")] * 5
    with pytest.raises(Internal, match="rank 1: out of memory"):
        await make_pusher(fleet).push(1)
    assert source.calls.count("send") == 1
    assert fleet.versions == {"a": 0}


async def test_weights_that_do_not_fit_are_the_reason_and_nothing_is_sent(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    fleet.engines["b"].misfit = "the push lacks lm_head"
    with pytest.raises(Misfit, match=r"to the rollout service: b: the push lacks lm_head; deploy the run's file"):
        await make_pusher(fleet).push(1)
    assert (fleet.phases, source.calls) == (["discover"], [])


async def test_a_replica_that_does_not_roll_back_is_not_in_the_next_attempt(source: FakeSource) -> None:
    fleet = Fleet(source, a=1, b=1)
    source.failures = [Internal("policy.send: broken pipe")]

    async def abort() -> bool:
        raise RuntimeError("the engine is gone")

    fleet.engines["b"].abort = abort  # type: ignore[method-assign]
    report = await make_pusher(fleet).push(5)
    assert (report.attempts, report.replicas, fleet.versions) == (2, ("a",), {"a": 5, "b": 0})
    assert fleet.phases == ["discover", "prepare", "transfer", "abort", *PUSH[1:]]


async def test_the_next_attempt_begins_when_the_learner_has_abandoned_the_last_or_could_not(
    source: FakeSource, logged: list[str]
) -> None:
    fleet, abandoned = Fleet(source, a=1), asyncio.Event()

    async def abandon(membership: int) -> None:
        await abandoned.wait()
        raise Internal("policy.abandon: rank 1 does not answer")

    source.abandon = abandon  # type: ignore[method-assign]
    source.failures = [Internal("policy.send: broken pipe")]
    pushing = asyncio.create_task(make_pusher(fleet).push(5))
    await until(lambda: "abort" in fleet.phases)
    await settled()
    assert fleet.phases[-1] == "abort"
    abandoned.set()
    assert (await pushing).attempts == 2
    assert any("could not abandon membership 1: policy.abandon: rank 1 does not answer" in line for line in logged)


async def test_a_push_that_fails_meanwhile_is_tried_again_and_its_error_waits_for_the_gathering(
    source: FakeSource,
) -> None:
    """All ranks take part in it: one that is given up would leave the others waiting."""
    fleet, copied = Fleet(source, a=1), asyncio.Event()

    async def gather(push: int) -> None:
        await copied.wait()

    source.gather = gather  # type: ignore[method-assign]
    source.failures = [Internal("bucket 0 was not gathered")] * 2
    pushing = asyncio.create_task(make_pusher(fleet, attempts=2).push(1))
    await until(lambda: fleet.phases.count("abort") == 2)
    await settled()
    assert not pushing.done()
    copied.set()
    with pytest.raises(PushFailed, match=r"^version 1 after 2 attempts: bucket 0 was not gathered$"):
        await pushing


async def test_a_replica_that_stands_still_is_waited_for_once(source: FakeSource) -> None:
    """The roll-back and later pushes wait for those that answered."""
    fleet = Fleet(source, a=1, b=1)
    pusher = make_pusher(fleet)
    await pusher.push(5)
    fleet.awaited.clear()
    fleet.mute = {("b", phase) for phase in ("prepare", "abort")}
    assert (await pusher.push(6)).replicas == ("a",)
    #  discover, prepare, abort; prepare, transfer, commit
    assert fleet.awaited == [["a", "b"], ["a", "b"], ["a"], ["a"], ["a"], ["a"]]
    fleet.awaited.clear()
    await pusher.push(7)
    assert fleet.awaited[0] == ["a"]
