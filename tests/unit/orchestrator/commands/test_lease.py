"""A run's hold on critic and rollout: claimed, renewed and given back; of two runs one is told."""

import asyncio
import itertools
from typing import Any

import pytest

from orchestrator.clients import Services
from orchestrator.commands import lease as lease_module
from orchestrator.commands.lease import holding, training
from orchestrator.commands.patience import Patience
from protos import common_pb2, critic_pb2
from protos import rollout_pb2 as pb
from quartet.serving.runs.lease import Fence
from quartet.wire.errors import LeaseLost, Unavailable, leaves
from tests.unit.virtual_time import in_virtual_time

TTL_S = 1.2
LOOK_S = 0.1
START_S = 60


def now() -> float:
    return asyncio.get_running_loop().time()


class FakeService:
    """A critic or a rollout replica with the real fence."""

    def __init__(self) -> None:
        self.fence = Fence(clock=now)
        self.claims = 0
        self.failures: list[Exception] = []
        self.lease = common_pb2.Lease()

    async def claim(
        self, lease: common_pb2.Lease, ttl_s: float, timeout_s: float, *, take_over: bool = False
    ) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.claims += 1
        self.fence.claim(lease, common_pb2.Claim(ttl_s=ttl_s, take_over=take_over))
        self.lease = lease

    async def info(self, timeout_s: float) -> critic_pb2.CriticInfo:
        return critic_pb2.CriticInfo(held=self.fence.held())

    async def update_weights(self, timeout_s: float, discover: pb.Discover) -> list[pb.WeightReport]:
        return [pb.WeightReport(replica="a", ok=True, held=self.fence.held())]

    @property
    def holder(self) -> str:
        return self.fence.held().lease.run_id


class Stage:
    def __init__(self, with_critic: bool = True) -> None:
        self.critic, self.rollout = FakeService(), FakeService()
        self.notes: list[str] = []
        unused: Any = None
        critic: Any = self.critic if with_critic else None
        self.services = Services(self.rollout, unused, unused, critic)  # type: ignore[arg-type]

    def hold(self, run_id: str, take_over: bool = False) -> Any:
        note = self.notes.append
        return holding(self.services, run_id, self.patience(), ttl_s=TTL_S, take_over=take_over, note=note)

    def patience(self) -> Patience:
        return Patience(START_S, 30, self.notes.append)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "LOOK_S", LOOK_S)


@in_virtual_time
async def test_a_run_holds_both_while_it_lives_and_gives_them_back() -> None:
    stage = Stage()
    async with stage.hold("a") as hold:
        lease = hold.lease
        assert lease == common_pb2.Lease(run_id="a", number=1)
        for _ in range(20):
            await asyncio.sleep(TTL_S / 10)
            for service in (stage.critic, stage.rollout):
                service.fence.check(lease)
                assert service.fence.held().left_s > 0
    assert stage.critic.fence.held().left_s == stage.rollout.fence.held().left_s == 0
    async with stage.hold("b") as hold:
        assert hold.lease.number == 2
    assert stage.notes == []


@in_virtual_time
async def test_a_run_without_a_critic_holds_the_replicas_alone() -> None:
    stage = Stage(with_critic=False)
    async with stage.hold("a") as hold:
        assert hold.lease == common_pb2.Lease(run_id="a", number=1)
        await hold.begin_timeline(stage.patience())
        assert hold.lease.number == stage.rollout.lease.number == 2
        for _ in range(20):
            await asyncio.sleep(TTL_S / 10)
            assert stage.rollout.fence.held().left_s > 0
        with pytest.raises(LeaseLost, match=r"run a is training with these services"):
            async with stage.hold("b"):
                raise AssertionError("both at once")
    assert stage.rollout.fence.held().left_s == 0
    assert stage.critic.claims == 0


@in_virtual_time
async def test_a_second_live_run_is_told_at_its_start_and_the_first_goes_on() -> None:
    stage = Stage()
    async with stage.hold("a") as hold:
        with pytest.raises(LeaseLost, match=r"run a is training with these services: stop it first, .* --take-over"):
            async with stage.hold("b"):
                raise AssertionError("both at once")
        stage.critic.fence.check(hold.lease)
    assert stage.notes == ["waiting up to 1 s: run a was alive a moment ago"]


@in_virtual_time
async def test_taking_over_ends_the_other_run_within_a_renewal() -> None:
    stage = Stage()

    async def both() -> None:
        async with stage.hold("a"), stage.hold("b", take_over=True) as hold:
            stage.critic.fence.check(hold.lease)
            await asyncio.sleep(10 * TTL_S)

    with pytest.raises(ExceptionGroup) as caught:
        await both()
    [error] = leaves(caught.value)
    assert isinstance(error, LeaseLost)
    assert "run a (lease 1) no longer holds this service: run b (lease 2) does" in str(error)
    assert now() == pytest.approx(TTL_S / lease_module.RENEWALS)


@in_virtual_time
async def test_a_crashed_runs_services_are_free_after_its_time_and_at_once_for_itself() -> None:
    stage = Stage()
    crashed = common_pb2.Lease(run_id="a", number=7)
    await stage.critic.claim(crashed, TTL_S, 1)
    await stage.rollout.claim(crashed, TTL_S, 1)
    async with stage.hold("a") as hold:
        assert (hold.lease.number, now()) == (8, 0)
    await stage.critic.claim(common_pb2.Lease(run_id="c", number=9), TTL_S, 1)
    async with stage.hold("b") as hold:
        assert hold.lease.number == 10
        assert 0.99 * TTL_S < now() < TTL_S + 2 * LOOK_S


@in_virtual_time
async def test_a_dead_run_is_not_alive_because_its_replicas_answer_in_another_order() -> None:
    stage, other, turns = Stage(with_critic=False), FakeService(), itertools.count()
    crashed = common_pb2.Lease(run_id="a", number=7)
    await stage.rollout.claim(crashed, TTL_S / 2, 1)
    await other.claim(crashed, TTL_S, 1)

    async def update_weights(timeout_s: float, discover: pb.Discover) -> list[pb.WeightReport]:
        held = [service.fence.held() for service in (stage.rollout, other)]
        return [pb.WeightReport(held=one) for one in (held if next(turns) % 2 else reversed(held))]

    stage.rollout.update_weights = update_weights  # type: ignore[method-assign]
    async with stage.hold("b"):
        assert 0.99 * TTL_S < now() < TTL_S + 2 * LOOK_S
    assert stage.notes == ["waiting up to 1 s: run a was alive a moment ago"]


@in_virtual_time
async def test_a_claim_that_only_one_service_takes_is_given_back() -> None:
    """At the deadline, which the error names with the service; until then it is repeated and the user is told."""
    stage = Stage()
    stage.rollout.failures = [Unavailable("rollout: away")] * 10_000
    with pytest.raises(Unavailable, match=r"^rollout: away; waited 60 s \(orchestrator\.timeouts\.start_s\)$"):
        async with stage.hold("a"):
            pass
    assert START_S - 3 < now() < START_S
    assert stage.critic.fence.held().left_s == 0
    assert stage.critic.fence.held().lease.number == 1
    assert [note.partition(": ")[2] for note in stage.notes] == ["rollout: away"] * 6


@pytest.mark.parametrize("service", ["critic", "rollout"])
@in_virtual_time
async def test_a_service_that_is_being_replaced_is_waited_for_at_the_start(service: str) -> None:
    stage = Stage()
    getattr(stage, service).failures = [Unavailable(f"{service}: failed to connect")] * 5
    async with stage.hold("a") as hold:
        assert hold.lease.number == 1
        assert stage.critic.lease == stage.rollout.lease == hold.lease
    assert stage.notes == [f"waiting up to 60 s: {service}: failed to connect"]


@in_virtual_time
async def test_a_run_that_comes_first_meanwhile_is_not_waited_for() -> None:
    stage = Stage()
    stage.rollout.failures = [Unavailable("rollout: away")] * 10_000

    async def other() -> None:
        await asyncio.sleep(5)
        stage.critic.fence.claim(common_pb2.Lease(run_id="b", number=9), common_pb2.Claim(ttl_s=60, take_over=True))

    taking = asyncio.create_task(other())
    with pytest.raises(LeaseLost, match="run b"):
        async with stage.hold("a"):
            pass
    await taking
    assert now() < 10


@in_virtual_time
async def test_a_service_that_is_away_for_a_moment_costs_nothing() -> None:
    stage = Stage()
    async with stage.hold("a"):
        claims = stage.rollout.claims
        stage.critic.failures = [Unavailable("critic: away")]
        await asyncio.sleep(TTL_S)
        assert stage.critic.failures == []
        assert stage.rollout.claims >= claims + 2  # nor is the other let go
        for service in (stage.critic, stage.rollout):
            assert (service.holder, service.fence.held().left_s > 0) == ("a", True)


@in_virtual_time
async def test_a_run_that_goes_back_claims_a_higher_number_and_renews_that_one() -> None:
    stage = Stage()
    async with stage.hold("a") as hold:
        before = hold.lease
        await hold.begin_timeline(stage.patience())
        assert (before.number, hold.lease) == (1, common_pb2.Lease(run_id="a", number=2))
        await asyncio.sleep(2 * TTL_S)
        for service in (stage.critic, stage.rollout):
            service.fence.check(hold.lease)
            assert service.fence.held().left_s > 0
            # Late calls of before the return are those of an older lease.
            with pytest.raises(LeaseLost, match=r"run a \(lease 1\) no longer holds this service: run a \(lease 2\)"):
                service.fence.check(before)
    assert stage.critic.fence.held().left_s == stage.rollout.fence.held().left_s == 0


@in_virtual_time
async def test_a_service_that_is_being_replaced_is_waited_for_when_the_run_goes_back() -> None:
    stage = Stage()
    async with stage.hold("a") as hold:
        stage.critic.failures, stage.rollout.failures = [Unavailable("critic: away")], [Unavailable("rollout: away")]
        await hold.begin_timeline(stage.patience())
        assert stage.critic.lease.number == stage.rollout.lease.number == hold.lease.number == 2


@in_virtual_time
async def test_a_run_that_was_taken_over_from_does_not_come_back_by_going_back() -> None:
    stage = Stage()
    taken = common_pb2.Lease(run_id="b", number=2)
    async with stage.hold("a") as hold:
        await stage.critic.claim(taken, TTL_S, 1, take_over=True)
        with pytest.raises(
            LeaseLost, match=r"run a \(lease 2\) no longer holds this service: run b \(lease 2\) does"
        ):
            await hold.begin_timeline(stage.patience())
    assert stage.critic.fence.held().lease == taken


@in_virtual_time
async def test_the_run_that_trains_is_named_while_it_is_alive() -> None:
    stage = Stage()
    assert await training(stage.services) == ""
    async with stage.hold("a"):
        assert await training(stage.services) == "a"
    assert await training(stage.services) == ""  # given back

    async def silent(timeout_s: float, **phase: Any) -> None:
        raise Unavailable("no replica")

    async with stage.hold("a"):
        stage.rollout.update_weights = silent  # type: ignore[method-assign, assignment]
        assert await training(stage.services) == ""
