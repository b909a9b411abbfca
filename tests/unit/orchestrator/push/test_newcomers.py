"""The task that lets newcomers in: what may mend itself is retried, anything else ends the run and is not silent."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RaySystemError

from orchestrator.push import newcomers
from orchestrator.push.newcomers import Desk, first_death, registered, taking_newcomers
from protos import common_pb2, rollout_pb2
from quartet.ranks.group import RanksLost
from quartet.weight_transfer import registry
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.registry import NAMESPACE, Answer, Applicant, Registry, Ticket
from quartet.wire.errors import Internal, LeaseLost, Unavailable, leaves
from services.rollout.member import WeightMember
from services.rollout.newcomer import catch_up
from tests.newcomers import adding_newcomers, once
from tests.unit.member_phases import FakeEngine, prepare, transfer
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled, until

LEASE = common_pb2.Lease(run_id="ours", number=4)


class FakeDesk:
    """A desk at which one replica always asks for weights."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: list[dict[str, Answer]] = []

    async def answer(self, answers: dict[str, Answer]) -> None:
        self.answers.append(answers)

    async def applicants(self) -> dict[str, int]:
        self.asked += 1
        await asyncio.sleep(0.001)
        return {"new": 1}


class FakePusher:
    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked = asyncio.Event()
        self.behind: set[str] = set()

    def joined(self, names: Iterable[str]) -> None:
        self.behind |= {*names}

    async def add_newcomers(self, applicants: Any, deliver: Any, first_death: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        await deliver(dict.fromkeys(applicants))
        self.asked.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomers, "RETRY_S", 0.01)


@pytest.mark.parametrize(
    "error",
    [Internal("policy.add_newcomers: gone"), RanksLost("rank 0 died"), RayActorError(), ConnectionResetError()],
)
@in_virtual_time
async def test_what_may_mend_itself_is_tried_again_and_said_in_one_line(error: Exception, logged: list[str]) -> None:
    pusher = FakePusher(error, error)
    async with adding_newcomers(pusher, FakeDesk(), LEASE, 30):  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            await pusher.asked.wait()
    # Two pauses, and three times a thousandth of a second at the desk.
    assert asyncio.get_running_loop().time() == pytest.approx(2 * 0.01 + 3 * 0.001)
    # Members of earlier tests in the same loop may still say that their pushes lapse.
    said = [line for line in logged if not line.startswith("push: ")]
    for line in said:
        assert line.startswith("rollout replicas that join (new): ")
        assert "\n" not in line
    assert len(said) == 2


class FakeReplica:
    """A replica's actor, whose looks end so, one after another and then as the last."""

    def __init__(self, *looks: Exception | None) -> None:
        self.looks = list(looks)
        self.__ray_ready__ = SimpleNamespace(remote=self._answer)

    async def _answer(self) -> None:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, TimeoutError):
            await asyncio.sleep(3600)
        if look is not None:
            raise look


@in_virtual_time
async def test_only_a_replica_that_ray_calls_dead_has_died() -> None:
    """One that stands still or that Ray does not reach may come yet, and one whose start takes long does."""
    frozen, unreached = (
        FakeReplica(TimeoutError()),
        FakeReplica(ActorUnavailableError("lost", None), RaySystemError("gone")),
    )
    dying = FakeReplica(None, None, ActorDiedError())
    applicants = {
        name: Applicant(1, Place("m"), actor) for name, actor in [("a", frozen), ("b", unreached), ("c", dying)]
    }
    assert await first_death(applicants) == "c"
    # Three looks at c, at none of which the frozen one is waited for longer than a look takes.
    assert asyncio.get_running_loop().time() == 3 * (0.5 + 0.5)
    del applicants["c"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await first_death(applicants)


@pytest.mark.parametrize("error", [KeyError("bucket"), TypeError("no"), LeaseLost("lease: another run holds them")])
async def test_anything_else_ends_the_run_with_that_error(error: Exception) -> None:
    async def run() -> None:
        async with adding_newcomers(FakePusher(error), FakeDesk(), LEASE, 30):  # type: ignore[arg-type]
            await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await run()
    assert leaves(caught.value) == [error]


class FakeActor:
    """A registry of FakeRay's, whose calls wait until it has started."""

    def __init__(self, start_s: float) -> None:
        self.registry, self.start_s = Registry(), start_s
        self.frozen = self.dies = False
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    async def _call(self, method: str, *arguments: Any) -> Any:
        call = asyncio.ensure_future(self._carry_out(method, *arguments))
        await asyncio.wait({call, self.gone}, return_when=asyncio.FIRST_COMPLETED)
        if not call.cancel():
            return call.result()
        raise ActorDiedError

    async def _carry_out(self, method: str, *arguments: Any) -> Any:
        if self.dies:
            raise ActorUnavailableError("killed, and being started again", None)
        await asyncio.sleep(self.start_s)
        self.start_s = 0
        if self.frozen:
            await asyncio.Event().wait()
        return None if method == "__ray_ready__" else await getattr(self.registry, method)(*arguments)


class FakeRay:
    """Ray, as far as a desk and newcomers use it."""

    def __init__(self) -> None:
        self.actors: dict[str, FakeActor] = {}
        self.starts_s: list[float] = []
        """Seconds that each actor takes to start, the next one first; none if it is empty."""
        self.forgotten: set[str] = set()
        """Names of actors whose run has ended, in the moment before they end."""
        self.lost = False
        """True while Ray names no actors."""
        self.connected = True
        """True until the program leaves the cluster."""

    def remote(self, _: type[Registry]) -> "FakeRay":
        return self

    def options(
        self, name: str, namespace: str, max_restarts: int, num_cpus: int, scheduling_strategy: Any, **_: Any
    ) -> Any:
        """A registry takes no room, since a cluster may have none left, and is with the run."""
        assert (namespace, max_restarts, num_cpus) == (NAMESPACE, -1, 0)
        assert (scheduling_strategy.node_id, scheduling_strategy.soft) == ("0" * 56, True)

        def start() -> FakeActor:
            if name in self.actors:
                raise ValueError(f"{name} is taken")
            self.actors[name] = FakeActor(self.starts_s.pop(0) if self.starts_s else 0)
            return self.actors[name]

        return SimpleNamespace(remote=start)

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        assert name not in self.forgotten
        if name not in self.actors:
            raise ValueError("no such actor")
        return self.actors[name]

    def kill(self, killed: FakeActor) -> None:
        self.actors = {name: actor for name, actor in self.actors.items() if actor is not killed}
        if not killed.gone.done():
            killed.gone.set_result(None)

    def list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        if self.lost:
            raise GetTimeoutError("the GCS does not answer")
        return [{"name": name, "namespace": NAMESPACE} for name in self.actors]

    def actor(self, number: int) -> FakeActor:
        """The registry of this number."""
        return self.actors[f"weights of rollout {number}"]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for name in ("remote", "get_actor", "kill"):
        monkeypatch.setattr(ray, name, getattr(fake, name))
    monkeypatch.setattr(registry, "list_named_actors", fake.list_named_actors)
    context = SimpleNamespace(current_actor=None, get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "is_initialized", lambda: fake.connected)
    return fake


@pytest.fixture
async def slow_ray(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A Ray whose calls the event loop carries out: TimeoutError where that waits for them."""
    loop, begun = asyncio.get_running_loop(), fake_ray.options

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        async def carried_out(*arguments: Any, **options: Any) -> Any:
            return call(*arguments, **options)

        return lambda *arguments, **options: asyncio.run_coroutine_threadsafe(
            carried_out(*arguments, **options), loop
        ).result(10)

    monkeypatch.setattr(fake_ray, "options", lambda **given: SimpleNamespace(remote=slow(begun(**given).remote)))
    monkeypatch.setattr(ray, "get_actor", slow(fake_ray.get_actor))
    monkeypatch.setattr(registry, "list_named_actors", slow(fake_ray.list_named_actors))
    return fake_ray


async def test_the_run_goes_on_while_ray_takes_its_time(slow_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_ray.actors["weights of rollout 1"] = FakeActor(0)
    async with registered("rollout", once) as desk:
        assert slow_ray.actors.keys() == {"weights of rollout 2"}
        slow_ray.actor(2).dies = True
        with pytest.raises(Unavailable):
            await desk.applicants()
        monkeypatch.setattr(newcomers, "WAIT_S", 0.01)
        assert await desk.applicants() == {}
        assert slow_ray.actors.keys() == {"weights of rollout 3"}
    assert not slow_ray.actors


async def test_a_ray_that_answers_nothing_keeps_no_run_from_its_end(
    slow_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def silent(**_: Any) -> Any:
        assert end.wait(60)
        return []

    try:
        async with asyncio.timeout(30):
            async with registered("rollout", once):
                monkeypatch.setattr(registry, "list_named_actors", silent)
                monkeypatch.setattr(newcomers, "ANSWER_S", 0.01)
            monkeypatch.setattr(newcomers, "START_S", 0.01)
            with pytest.raises(Unavailable, match=r"did not start the registry .* within 0\.01 s"):
                async with registered("rollout", once):
                    pytest.fail("opened")
        slow_ray.connected, slow_ray.actors = False, {}  # with the run, its actors end
    finally:
        end.set()
        async with asyncio.timeout(30):
            while any(thread.name == newcomers._THREAD for thread in threading.enumerate()):
                await asyncio.sleep(0.01)
    assert not slow_ray.actors  # an answer after the end has begun none


class FakeMember:
    """A new replica's member, which carries everything out."""

    async def carry_out(self, phase: rollout_pb2.WeightPhase) -> rollout_pb2.WeightReport:
        self.lease = phase.lease
        return rollout_pb2.WeightReport(ok=True)


async def joined() -> None:
    """Returns when a new replica has joined the run, and fails if it found none."""
    member = FakeMember()
    await catch_up(member, SimpleNamespace(workers=1, place=Place("m")), "new", "rollout", 600)  # type: ignore
    assert member.lease == LEASE


async def test_a_registry_that_ray_does_not_even_begin_to_start_is_a_loss(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> Any:
        raise RaySystemError("the GCS is gone\nand more")

    monkeypatch.setattr(ray, "remote", refuse)
    with pytest.raises(Unavailable, match=r"did not start the registry .*\(.*the GCS is gone\);"):
        async with registered("rollout", once):
            pytest.fail("opened")


@pytest.mark.parametrize("applies", ["before", "after"])
@in_virtual_time
async def test_a_registry_that_stands_still_is_left_for_the_next_one(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, applies: str
) -> None:
    """Newcomers always find one, or they would begin with weights of their own."""
    fake_ray.starts_s = [1, 50]
    async with asyncio.timeout(100), registered("rollout", once) as desk:
        frozen = fake_ray.actor(1)
        frozen.frozen = True
        async with asyncio.TaskGroup() as group, adding_newcomers(FakePusher(), desk, LEASE, 30):  # type: ignore
            if applies == "after":
                await asyncio.sleep(20)
                assert fake_ray.actors.keys() == {"weights of rollout 1", "weights of rollout 2"}
            await group.create_task(joined())
        assert frozen.gone.done()
        assert fake_ray.actors.keys() == {"weights of rollout 2"}
    assert not fake_ray.actors


@in_virtual_time
async def test_a_registry_that_does_not_start_in_its_turn_is_given_up_and_started_again(fake_ray: FakeRay) -> None:
    fake_ray.starts_s = [0, 1000, 1000, 1]
    async with asyncio.timeout(300), registered("rollout", once) as desk:
        fake_ray.actor(1).frozen = True
        async with adding_newcomers(FakePusher(), desk, LEASE, 30):  # type: ignore[arg-type]
            await joined()
        assert fake_ray.actors.keys() == {"weights of rollout 2"}


@in_virtual_time
async def test_a_registry_that_was_killed_is_left_for_the_next_one_at_once(fake_ray: FakeRay) -> None:
    async with asyncio.timeout(4), registered("rollout", once) as desk:
        fake_ray.actor(1).dies = True
        async with adding_newcomers(FakePusher(), desk, LEASE, 30):  # type: ignore[arg-type]
            await joined()


@in_virtual_time
async def test_registries_of_earlier_runs_are_ended_or_left_to_ray(fake_ray: FakeRay) -> None:
    for number in (9, 10):
        fake_ray.actors[f"weights of rollout {number}"] = FakeActor(0)
    for other in ("weights of rollout", "weights of rollout 2 11", "weights of my rollout 12", "sessions of rollout"):
        fake_ray.actors[other] = FakeActor(0)
    fake_ray.forgotten.add("weights of rollout 10")
    async with registered("rollout", once):
        assert registry.registries("rollout") == [10, 11]
    assert len(fake_ray.actors) == 5


@in_virtual_time
async def test_a_registry_is_opened_and_left_while_ray_names_none(fake_ray: FakeRay) -> None:
    async with registered("rollout", once) as desk:
        fake_ray.actor(1).frozen = fake_ray.lost = True
        with pytest.raises(Unavailable):
            await desk.applicants()
        assert await desk.applicants() == {}
        assert fake_ray.actors.keys() == {"weights of rollout 1", "weights of rollout 2"}


@in_virtual_time
async def test_a_newcomer_asks_again_while_ray_names_no_registry(fake_ray: FakeRay) -> None:
    async with registered("rollout", once) as desk, adding_newcomers(FakePusher(), desk, LEASE, 30):  # type: ignore[arg-type]
        fake_ray.lost = True
        asyncio.get_running_loop().call_later(5, setattr, fake_ray, "lost", False)
        await joined()


class TicketPusher(FakePusher):
    """One that has pushed, and sends the weights to each applicant."""

    tickets = 0

    async def add_newcomers(self, applicants: Any, deliver: Any, first_death: Any) -> None:
        self.tickets += 1
        phases = prepare(self.tickets, new=1) | transfer(self.tickets)
        phases["commit"] = rollout_pb2.Commit(membership=self.tickets, policy_version=7)
        packed = {name: phase.SerializeToString() for name, phase in phases.items()}
        await deliver(dict.fromkeys(applicants, Ticket(**packed, checksum="new", timeout_s=5)))


class IllEngine(FakeEngine):
    """One that fails to join once, or always if it is ill."""

    def __init__(self, illness: Exception | None) -> None:
        super().__init__()
        self.illness = illness

    async def join(self, init_info: dict[str, Any]) -> None:
        await super().join(init_info)
        if self.illness or len(self.calls) == 1:
            raise Unavailable("the group did not form")

    async def check_health(self) -> None:
        if self.illness:
            raise self.illness


@pytest.mark.parametrize(
    ("illness", "outcome", "tickets"),
    [
        (None, "joined", 2),
        (Unavailable("a worker has ended"), r"new cannot join, .*a worker has ended.*: prepare: .*did not form", 1),
        (TimeoutError(), r"new got no weights from the run .* in 3 s: prepare: .*did not form", 6),
    ],
)
@in_virtual_time
async def test_a_newcomer_applies_again_unless_its_engine_is_dead(
    fake_ray: FakeRay, illness: Exception | None, outcome: str, tickets: int
) -> None:
    """Serve replaces it then. Each application costs the run a wait for a member that does not come."""
    engine, pusher = IllEngine(illness), TicketPusher()
    member: Any = WeightMember(engine, "new")  # type: ignore[arg-type]
    async with registered("rollout", once) as desk, adding_newcomers(pusher, desk, LEASE, 30):  # type: ignore[arg-type]
        with nullcontext() if illness is None else pytest.raises(Unavailable, match=outcome):
            await catch_up(member, engine, "new", "rollout", 3)  # type: ignore[arg-type]
    assert pusher.tickets == tickets
    assert engine.version == (7 if illness is None else 3)


@in_virtual_time
async def test_a_run_that_was_taken_over_ends_no_registry_of_the_others(fake_ray: FakeRay) -> None:
    ours, theirs = Desk("rollout"), Desk("rollout")
    await ours.open()
    await theirs.open()
    with pytest.raises(Unavailable):
        await ours.applicants()
    with pytest.raises(Unavailable, match="weights of rollout 2 is taken"):
        await ours.applicants()
    assert await theirs.applicants() == {}
    fake_ray.actor(2).frozen = True
    with pytest.raises(Unavailable):
        await theirs.applicants()
    assert await theirs.applicants() == {}
    assert await ours.applicants() == {}  # number 2, which is free again, and to which no replica applies
    assert registry.registries("rollout") == [2, 3]
    assert await theirs.applicants() == {}
    await ours.close()
    assert registry.registries("rollout") == [3]
    await theirs.close()
    assert not fake_ray.actors


class QuietDesk(FakeDesk):
    """A desk to which one replica comes, and then none."""

    def __init__(self) -> None:
        super().__init__()
        self.left = False

    async def applicants(self) -> dict[str, int]:
        if self.asked == 0:
            return await super().applicants()
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True
        return {}


async def test_a_run_that_ends_is_not_held_up() -> None:
    desk = QuietDesk()
    adding = adding_newcomers(FakePusher(), desk, LEASE, 30)  # type: ignore[arg-type]
    async with asyncio.timeout(5), adding:
        await until(lambda: desk.asked == 2)
        assert not desk.left
    assert desk.left
    await settled()
    assert desk.asked == 2


async def test_a_newcomer_is_answered_under_the_lease_that_the_run_holds_now_with_a_pusher_and_without() -> None:
    """After a return to a checkpoint that is another one than when it applied: the timeline of what it will hold.
    Until the pusher of the new learner is there, a run waits for the replica, and not the replica for the run."""
    desk, held = FakeDesk(), common_pb2.Lease(run_id="ours")
    async with asyncio.timeout(5), taking_newcomers(desk, lambda: held, 30) as newcomers:  # type: ignore[arg-type]
        for held.number in (4, 5):
            answers = len(desk.answers)
            await until(lambda: len(desk.answers) > answers + 1)  # noqa: B023
            assert desk.answers[-1] == {"new": Answer(held.SerializeToString(), 30, None)}
            pusher = FakePusher()
            async with newcomers.brought_by(pusher):  # type: ignore[arg-type]
                await pusher.asked.wait()
            assert desk.answers[-1] == {"new": Answer(held.SerializeToString(), 30, None)}
            assert pusher.behind == {"new"}


async def test_a_replica_that_began_without_a_pusher_is_told_to_the_next_one_alone() -> None:
    desk, first, second = QuietDesk(), FakePusher(), FakePusher()
    async with asyncio.timeout(5), taking_newcomers(desk, lambda: LEASE, 30) as newcomers:  # type: ignore[arg-type]
        await until(lambda: desk.asked == 2)
        for pusher in (first, second):
            async with newcomers.brought_by(pusher):  # type: ignore[arg-type]
                pass
    assert (first.behind, second.behind) == ({"new"}, set())


class StuckPusher(FakePusher):
    """Never answers."""

    left = False

    async def add_newcomers(self, *_: Any) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True


async def test_a_pusher_that_is_closed_leaves_its_newcomers_to_the_run() -> None:
    desk, pusher = FakeDesk(), StuckPusher()
    async with asyncio.timeout(5), taking_newcomers(desk, lambda: LEASE, 30) as newcomers:  # type: ignore[arg-type]
        async with newcomers.brought_by(pusher):  # type: ignore[arg-type]
            await pusher.asked.wait()
            answers = len(desk.answers)
        assert pusher.left
        await until(lambda: len(desk.answers) > answers)


async def test_a_run_that_ends_before_its_pusher_is_closed_leaves_no_newcomers_to_it() -> None:
    pusher = StuckPusher()
    async with AsyncExitStack() as later, asyncio.timeout(5):
        async with taking_newcomers(FakeDesk(), lambda: LEASE, 30) as newcomers:  # type: ignore[arg-type]
            await later.enter_async_context(newcomers.brought_by(pusher))  # type: ignore[arg-type]
            await pusher.asked.wait()
        assert pusher.left
