"""Registries as real actors: those of a run that has just ended, and those that a signal stops."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError
from ray.experimental.internal_kv import _internal_kv_del

from orchestrator.push import newcomers
from orchestrator.push.newcomers import registered
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.registry import NAMESPACE, Answer, Applicant, registries, registry_name
from quartet.wire.errors import Unavailable
from tests.cluster import Quartet, eventually
from tests.forked import FORKED
from tests.newcomers import once

APPLICATION = "rollout of another"


def open_registry(job: Connection, address: str, environment: dict[str, str]) -> None:
    """Opens one as a run does, and keeps it until this process is killed."""
    os.environ.update(environment)

    async def keep() -> None:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        async with registered(APPLICATION, once):
            job.send(ray.get_runtime_context().get_job_id())
            await asyncio.sleep(600)

    asyncio.run(keep())


@pytest.fixture
def earlier(quartet: Quartet, on_ray: None) -> Iterator[tuple[Any, str]]:
    """The process of a run whose registry is open, and its job at Ray."""
    pipe, end = FORKED.Pipe()
    arguments = (end, quartet.cluster.address, dict(os.environ))
    process: Any = FORKED.Process(target=open_registry, args=arguments, daemon=True)
    process.start()
    end.close()
    yield process, pipe.recv()
    process.kill()


async def test_a_run_that_ended_with_its_registry_still_there_is_in_no_others_way(earlier: tuple[Any, str]) -> None:
    process, job = earlier
    # Ray forgets a job's classes before it ends the job's actors; the moment between is made longer here.
    assert _internal_kv_del(f"ActorClass:{job}:", del_by_prefix=True, namespace=b"fun") == 1
    [number] = registries(APPLICATION)
    with pytest.raises(AssertionError):
        actor_of(number)
    async with registered(APPLICATION, once) as desk:
        assert registries(APPLICATION) == [number, number + 1]
        applied = actor_of(number + 1).apply.remote("new", Applicant(1, Place("m")))
        while not (waiting := await desk.applicants()):
            pass  # the application is on its way
        assert waiting == {"new": Applicant(1, Place("m"))}
        await desk.answer({"new": Answer(b"lease", 60, None)})
        assert await applied == Answer(b"lease", 60, None)
        process.kill()
        await left([number + 1])
    await left([])


async def test_a_registry_that_a_signal_stops_is_left_for_the_next_and_ends_when_it_wakes(
    on_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run cannot end its process on a cluster of one's own."""
    async with registered(APPLICATION, once) as desk:
        [number] = registries(APPLICATION)
        actor = actor_of(number)
        frozen = psutil.Process(await actor.__ray_call__.remote(lambda _: os.getpid()))
        assert await desk.applicants() == {}
        frozen.suspend()
        applied = actor.apply.remote("new", Applicant(1, Place("m")))
        monkeypatch.setattr(newcomers, "ANSWER_S", 1)
        with pytest.raises(Unavailable):
            await desk.applicants()
        monkeypatch.undo()
        assert await desk.applicants() == {}
        assert registries(APPLICATION) == [number + 1]
        with pytest.raises(ActorDiedError):
            await applied
        with suppress(psutil.NoSuchProcess):  # Ray may have ended it already
            frozen.resume()
        await asyncio.to_thread(frozen.wait, 30)
        assert await desk.applicants() == {}
    await left([])


async def test_a_registry_that_ray_starts_too_late_leaves_its_number_to_the_next(
    on_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registered(APPLICATION, once) as desk:
        [number] = registries(APPLICATION)
        late = threading.Event()

        def named(application: str, number: int) -> str:
            assert late.wait(60)
            return registry_name(application, number)

        monkeypatch.setattr(newcomers, "registry_name", named)
        monkeypatch.setattr(newcomers, "START_S", 0.1)
        with pytest.raises(Unavailable):
            await desk.open()
        monkeypatch.undo()
        late.set()

        async def opened() -> bool:
            with suppress(Unavailable):
                await desk.open()
                return True
            return False

        await eventually(opened, 60)
        assert await desk.applicants() == {}
        await left([number + 1])
    await left([])


def actor_of(number: int) -> Any:
    """The registry of this number."""
    return ray.get_actor(registry_name(APPLICATION, number), namespace=NAMESPACE)


async def left(numbers: list[int]) -> None:
    """Waits until these registries are left: Ray does not wait for an actor that it kills."""

    async def gone() -> bool:
        return registries(APPLICATION) == numbers

    await eventually(gone, 30)
