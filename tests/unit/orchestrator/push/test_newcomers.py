"""The task that lets newcomers in: what may mend itself is retried, anything else ends the run and is not silent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RaySystemError

from orchestrator.push import newcomers
from orchestrator.push.newcomers import adding_newcomers, first_death, registered
from protos import common_pb2
from quartet.ranks.group import RanksLost
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.registry import Answer, Applicant
from quartet.wire.errors import Internal, LeaseLost, Unavailable, leaves
from tests.unit.virtual_time import in_virtual_time
from tests.unit.waiting import settled, until

LEASE = common_pb2.Lease(run_id="ours", number=4)


class FakeRegistry:
    """An actor of which one replica always asks for weights."""

    def __init__(self) -> None:
        self.asked = 0
        self.applicants = self
        self.answers: list[dict[str, Answer]] = []
        self.answer = SimpleNamespace(remote=self.told)

    async def told(self, answers: dict[str, Answer]) -> None:
        self.answers.append(answers)

    async def remote(self, wait_s: float) -> dict[str, int]:
        self.asked += 1
        await asyncio.sleep(0.001)
        return {"new": 1}


class FakePusher:
    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.asked = asyncio.Event()

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
async def test_what_may_mend_itself_is_tried_again_and_said_in_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    pusher = FakePusher(error, error)
    async with adding_newcomers(pusher, FakeRegistry(), LEASE, 30):  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            await pusher.asked.wait()
    # Members of earlier tests in the same loop may still say that their pushes lapse.
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("push: ")]
    for line in said:
        assert line.startswith("rollout replicas that join (new): ")
    assert len(said) == 2


class FakeActor:
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
        FakeActor(TimeoutError()),
        FakeActor(ActorUnavailableError("lost", None), RaySystemError("gone")),
    )
    dying = FakeActor(None, None, ActorDiedError())
    applicants = {
        name: Applicant(1, Place("m"), actor) for name, actor in [("a", frozen), ("b", unreached), ("c", dying)]
    }
    assert await first_death(applicants) == "c"
    del applicants["c"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await first_death(applicants)


@pytest.mark.parametrize("error", [KeyError("bucket"), TypeError("no"), LeaseLost("lease: another run holds them")])
async def test_anything_else_ends_the_run_with_that_error(error: Exception) -> None:
    async def run() -> None:
        async with adding_newcomers(FakePusher(error), FakeRegistry(), LEASE, 30):  # type: ignore[arg-type]
            await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(5):
            await run()
    assert leaves(caught.value) == [error]


async def test_a_registry_that_ray_does_not_even_begin_to_start_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def options(self, **_: Any) -> Any:
            return self

        def remote(self) -> Any:
            raise RaySystemError("the GCS is gone\nand more")

    monkeypatch.setattr(ray, "remote", lambda _: Refusing())
    with pytest.raises(Unavailable, match=r"did not start the registry .*\(.*the GCS is gone\);"):
        async with registered("rollout"):
            pytest.fail("opened")


class Taken:
    """Ray, in which an earlier run's registry has the name for two more tries."""

    def __init__(self) -> None:
        self.tries = 0
        self.killed: list[Any] = []
        self.__ray_ready__ = SimpleNamespace(remote=self._started)

    async def _started(self) -> None: ...

    def options(self, **_: Any) -> "Taken":
        return self

    def remote(self) -> "Taken":
        self.tries += 1
        if self.tries < 3:
            raise (ValueError, AssertionError)[self.tries % 2]("the name is taken")
        return self

    def get_actor(self, name: str, namespace: str) -> str:
        if self.tries == 2:
            raise ValueError("it has ended meanwhile")
        return name


async def test_a_registry_of_an_earlier_run_is_ended_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = Taken()
    monkeypatch.setattr(ray, "remote", lambda _: earlier)
    monkeypatch.setattr(ray, "get_actor", earlier.get_actor)
    monkeypatch.setattr(ray, "kill", earlier.killed.append)
    async with registered("rollout") as registry:
        assert (registry, earlier.tries) == (earlier, 3)
    assert earlier.killed == ["weights of rollout", registry]
    earlier.tries = -1000
    monkeypatch.setattr(newcomers, "GONE_S", 0.05)
    with pytest.raises(Unavailable, match="has not ended the registry of an earlier run"):
        async with registered("rollout"):
            pytest.fail("opened")


class SlowRegistry:
    """An actor that stands still, and whose successor takes `start_s` to start: its calls wait meanwhile, as Ray's
    do."""

    def __init__(self, start_s: float, *, dead: bool = False) -> None:
        self._start_s, self._dead = start_s, dead
        self._up: asyncio.Event | None = None
        self.kills: list[float] = []
        self.applied = asyncio.Event()
        self.applicants = SimpleNamespace(remote=self._applicants)
        self.answer = SimpleNamespace(remote=self._answer)
        self.__ray_ready__ = SimpleNamespace(remote=self._reached)

    def kill(self, registry: Any, *, no_restart: bool) -> None:
        assert (registry, no_restart) == (self, False)
        self.kills.append(asyncio.get_running_loop().time())
        self._begin()

    def _begin(self) -> None:
        self._up = asyncio.Event()
        asyncio.get_running_loop().call_later(self._start_s, self._up.set)

    async def _reached(self) -> None:
        if self._dead:
            self._dead = False
            self._begin()
            raise RayActorError
        await (asyncio.Event() if self._up is None else self._up).wait()
        await asyncio.sleep(0.001)

    async def _applicants(self, wait_s: float) -> dict[str, int]:
        await self._reached()
        return {"new": 1}

    async def _answer(self, answers: dict[str, Answer]) -> None:
        await self._reached()
        self.applied.set()


@pytest.mark.parametrize(("start_s", "kills"), [(50, 1), (100, 2), (200, 3)])
@in_virtual_time
async def test_a_registry_that_stands_still_is_ended_and_its_successor_has_the_time_to_start(
    monkeypatch: pytest.MonkeyPatch, start_s: float, kills: int
) -> None:
    """The first kill after 20 s. If its start takes longer than 60 s, the next has 120 s, and the next 240 s."""
    registry = SlowRegistry(start_s)
    monkeypatch.setattr(ray, "kill", registry.kill)
    async with asyncio.timeout(600), adding_newcomers(FakePusher(), registry, LEASE, 30):  # type: ignore[arg-type]
        await registry.applied.wait()
    assert [round(at) for at in registry.kills] == [20, 80, 200][:kills]


@in_virtual_time
async def test_the_successor_of_a_registry_that_died_by_itself_has_that_time_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = SlowRegistry(50, dead=True)
    monkeypatch.setattr(ray, "kill", registry.kill)
    async with asyncio.timeout(600), adding_newcomers(FakePusher(), registry, LEASE, 30):  # type: ignore[arg-type]
        await registry.applied.wait()
    assert registry.kills == []


class QuietRegistry(FakeRegistry):
    """A registry to which one replica applies, and then none."""

    def __init__(self) -> None:
        super().__init__()
        self.left = False

    async def remote(self, wait_s: float) -> dict[str, int]:
        if self.asked == 0:
            return await super().remote(wait_s)
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left = True
        return {}


async def test_a_run_that_ends_is_not_held_up() -> None:
    registry = QuietRegistry()
    adding = adding_newcomers(FakePusher(), registry, LEASE, 30)  # type: ignore[arg-type]
    async with asyncio.timeout(5), adding:
        await until(lambda: registry.asked == 2)
        assert not registry.left
    assert registry.left
    await settled()
    assert registry.asked == 2


async def test_a_newcomer_gets_the_lease_that_the_run_holds_now_with_its_ticket() -> None:
    """After a return to a checkpoint that is another one than when it applied: the timeline of what it will hold."""
    registry = FakeRegistry()
    for number in (4, 5):
        pusher, lease = FakePusher(), common_pb2.Lease(run_id="ours", number=number)
        async with asyncio.timeout(5), adding_newcomers(pusher, registry, lease, 30):  # type: ignore[arg-type]
            await pusher.asked.wait()
        assert registry.answers[-1] == {"new": Answer(lease.SerializeToString(), 30, None)}
