"""Errors of a rank that is a Ray actor: those of its method, and those that say that it is lost."""

import asyncio
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    OwnerDiedError,
    RayActorError,
    RaySystemError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from quartet.config.learner import LearnerConfig
from quartet.ranks.group import RankDied, RanksLost
from quartet.ranks.nccl_settings import DEFAULTS, GIVE_UP
from quartet.ranks.ranks import Ranks
from quartet.ranks.ray_rank import RayRank, _answer, own_place, ray_ranks
from quartet.ranks.stopped import is_stopped
from quartet.wire.errors import InvalidArgument, ResourceExhausted
from tests.unit.waiting import until

CONFIG = LearnerConfig.model_construct(ranks=1, rank_timeout_s=60.0)


def started(_: Ranks) -> None:
    """Builds no trainer."""


async def raising(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        ActorUnavailableError("away", None),
        RuntimeEnvSetupError("the agent died"),
        OwnerDiedError("00" * 28, None, ""),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_ray_has_lost_of_a_rank_ends_its_group(error: Exception) -> None:
    with pytest.raises(RankDied) as caught:
        await _answer(raising(error))
    assert str(caught.value) == str(error).partition("\n")[0]


async def test_an_error_of_its_method_is_raised_as_it_is() -> None:
    cause = InvalidArgument("policy.restore: another layout")
    with pytest.raises(InvalidArgument) as caught:
        await _answer(raising(RayTaskError("run", "Traceback", cause)))
    assert caught.value is cause


class FakeActor:
    """Has methods that give these answers."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._answer, name), options=lambda **_: getattr(self, name))

    async def _answer(self, name: str) -> Any:
        return self._answers[name]


class FakeRay:
    """Makes an actor when its GCS answers."""

    def __init__(self) -> None:
        self.actor: FakeActor | Exception | None = None
        self.asked, self.answers = threading.Event(), threading.Event()
        self.killed: list[FakeActor] = []

    def remote(self, *_: Any) -> Any:
        self.asked.set()
        assert self.answers.wait(30)
        actor, self.actor = self.actor, None
        if isinstance(actor, Exception):
            raise actor
        return actor


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """In the place of Ray."""
    fake = FakeRay()
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: SimpleNamespace(options=lambda **_: fake))
    monkeypatch.setattr(ray, "kill", fake.killed.append)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    yield fake
    fake.answers.set()


async def test_the_loop_goes_on_while_ray_makes_an_actor_and_calls_wait_in_their_order(fake_ray: FakeRay) -> None:
    fake_ray.actor = FakeActor(place=("elsewhere", 1), run=7, run_beside=8)
    rank = RayRank("policy", CONFIG, 0, {})
    calls = [asyncio.ensure_future(rank.call(method)) for method in ("run", "run_beside")]
    await asyncio.sleep(0.01)
    assert not any(call.done() for call in calls)
    fake_ray.answers.set()
    assert await asyncio.gather(*calls) == [7, 8]
    rank.kill()
    assert len(fake_ray.killed) == 1


async def test_ranks_that_ray_does_not_make_in_time_are_an_error_that_says_so(fake_ray: FakeRay) -> None:
    group = ray_ranks("policy", CONFIG, {})
    with pytest.raises(
        ResourceExhausted, match=r"no answer within 0\.05 s from rank 0 of 1; .* does its head answer"
    ):
        await group.start(started, timeout_s=0.05)
    with pytest.raises(RanksLost):
        group.check()


async def test_an_actor_that_ray_makes_too_late_has_no_handle_and_so_ends(fake_ray: FakeRay) -> None:
    fake_ray.actor = FakeActor()
    made = weakref.ref(fake_ray.actor)
    group = ray_ranks("policy", CONFIG, {})
    starting = asyncio.ensure_future(group.start(started, timeout_s=30))
    await until(fake_ray.asked.is_set)
    group.stop()
    with pytest.raises(RanksLost, match="rank 0 of 1 died: it was ended before Ray had made it"):
        await starting
    assert made() is not None
    fake_ray.answers.set()
    await until(lambda: made() is None)
    assert not fake_ray.killed


async def test_an_actor_that_ray_cannot_make_is_a_rank_that_died(fake_ray: FakeRay) -> None:
    fake_ray.actor = RaySystemError("the connection is lost")
    fake_ray.answers.set()
    group = ray_ranks("policy", CONFIG, {})
    with pytest.raises(RanksLost, match=r"rank 0 of 1 died: .*the connection is lost"):
        await group.start(started, timeout_s=30)
    group.stop()


@pytest.mark.processes
@pytest.mark.parametrize(("node", "seen"), [("here", True), ("elsewhere", False)])
async def test_a_process_that_is_stopped_or_has_ended_is_seen_on_this_machine_only(
    fake_ray: FakeRay, node: str, seen: bool
) -> None:
    """A process id says nothing about another machine's processes."""
    process = await asyncio.create_subprocess_exec("sleep", "600")
    fake_ray.actor = actor = FakeActor(place=(node, process.pid), run=7)
    rank = RayRank("policy", CONFIG, 0, {})
    try:
        assert not rank.stopped  # it has not begun
        fake_ray.answers.set()
        assert await rank.call("run") == 7
        await until(rank._placed.done)
        assert not rank.stopped
        process.send_signal(signal.SIGSTOP)
        if seen:
            await until(lambda: rank.stopped)
            assert not rank.death
            rank.kill()
            assert await process.wait() == -signal.SIGKILL
        else:
            await until(lambda: is_stopped(psutil.Process(process.pid)))
            assert not rank.stopped
            rank.kill()
            assert process.returncode is None
            process.kill()
            await process.wait()
        assert rank.death == ("its process has ended" if seen else "")
        assert fake_ray.killed == [actor]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_rank_on_a_gpu_begins_with_the_variables_that_a_push_changes(policy_folder: Path) -> None:
    def variables_of(**fields: Any) -> dict[str, str]:
        given: dict[str, Any] = {"optimizer": {"learning_rate": 1e-5}, "model": str(policy_folder)}
        return dict(own_place(LearnerConfig.parse(given | fields, "policy"))["runtime_env"]["env_vars"])

    assert variables_of() == {}
    assert variables_of(num_gpus=1, env_vars={"OMP_NUM_THREADS": "8"}) == DEFAULTS | {"OMP_NUM_THREADS": "8"}
    own = {"CUDA_VISIBLE_DEVICES": "3", GIVE_UP: "9"}
    assert variables_of(env_vars=own) == DEFAULTS | own
