"""The registry of a run that has just ended stands in the next one's way for a moment only."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
from ray.experimental.internal_kv import _internal_kv_del

from orchestrator.push.newcomers import registered
from services.common.weight_transfer.place import Place
from services.common.weight_transfer.registry import NAME_ERRORS, NAMESPACE, Answer, Applicant, registry_name
from tests.cluster import Quartet

APPLICATION = "rollout of another"
OPEN = f"""
import asyncio, ray, sys
from orchestrator.push.newcomers import registered

async def main():
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    async with registered({APPLICATION!r}):
        print(ray.get_runtime_context().get_job_id(), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def earlier(quartet: Quartet, on_ray: None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a run whose registry is open, and its job at Ray."""
    arguments = [sys.executable, "-c", OPEN, quartet.cluster.address]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def test_a_run_that_ended_with_its_registry_still_there_is_waited_for(
    earlier: tuple[subprocess.Popen[str], str],
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
    assert await registry.applicants.remote() == {"new": Applicant(1, Place("m"))}
    await registry.answer.remote({"new": Answer(b"lease", 60, None)})
    assert await applied == Answer(b"lease", 60, None)
    await opening.__aexit__(None, None, None)
    with pytest.raises(NAME_ERRORS):
        ray.get_actor(registry_name(APPLICATION), namespace=NAMESPACE)
