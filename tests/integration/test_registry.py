"""The registry of a run that has just ended stands in the next one's way for a moment only."""

import asyncio
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import ray
from ray.experimental.internal_kv import _internal_kv_del

from orchestrator.push.newcomers import registered
from quartet.weight_transfer.place import Place
from quartet.weight_transfer.registry import NAME_ERRORS, NAMESPACE, Answer, Applicant, registry_name
from tests.cluster import Quartet, eventually
from tests.forked import FORKED

APPLICATION = "rollout of another"


def open_registry(job: Connection, address: str, environment: dict[str, str]) -> None:
    """Opens one as a run does, and keeps it until this process is killed."""
    os.environ.update(environment)

    async def keep() -> None:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        async with registered(APPLICATION):
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


@pytest.mark.exhaustive  # half a minute of waiting for Ray; the wait itself: tests/unit/orchestrator/push
async def test_a_run_that_ended_with_its_registry_still_there_is_waited_for(
    earlier: tuple[Any, str],
) -> None:
    process, job = earlier
    # Ray forgets a job's classes before it ends the job's actors; the moment between is made longer here.
    assert _internal_kv_del(f"ActorClass:{job}:", del_by_prefix=True, namespace=b"fun") == 1
    with pytest.raises(AssertionError):
        ray.get_actor(registry_name(APPLICATION), namespace=NAMESPACE)
    opening = registered(APPLICATION)
    entering = asyncio.create_task(opening.__aenter__())
    assert not (await asyncio.wait({entering}, timeout=2))[0]
    process.kill()
    registry = await entering
    applied = registry.apply.remote("new", Applicant(1, Place("m")))
    assert await registry.applicants.remote(60) == {"new": Applicant(1, Place("m"))}
    await registry.answer.remote({"new": Answer(b"lease", 60, None)})
    assert await applied == Answer(b"lease", 60, None)
    await opening.__aexit__(None, None, None)

    async def gone() -> bool:
        try:
            ray.get_actor(registry_name(APPLICATION), namespace=NAMESPACE)
        except NAME_ERRORS:
            return True
        return False

    await eventually(gone, 10)  # Ray does not wait for an actor that it kills
