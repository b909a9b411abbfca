"""Letting new rollout replicas in between two pushes, while the loop goes on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray

from orchestrator.policy_actor import PolicyError
from orchestrator.weights import WeightPusher
from services.common.errors import ServiceError
from services.common.weight_transfer.registry import NAMESPACE, Admission, Registry, registry_name

log = logging.getLogger("quartet")

RETRY_S = 1.0
START_S = 60
GONE_S = 30
"""How long Ray may take to notice that an earlier run of this application has ended."""


@asynccontextmanager
async def registered(application: str) -> AsyncIterator[Any]:
    """While this is open, this is the run that trains the application: newcomers wait in the registry that it gives.

    Raises:
        ServiceError: another run trains this application, and still does after GONE_S.
    """
    registry = await _open_registry(application)
    try:
        yield registry
    finally:
        ray.kill(registry)


@asynccontextmanager
async def admissions(pusher: WeightPusher, registry: Any) -> AsyncIterator[None]:
    """While this is open, newcomers to the rollout application are brought to the last pushed version."""
    serving = asyncio.create_task(_serve(pusher, registry))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _open_registry(application: str) -> Any:
    options: dict[str, Any] = {"name": registry_name(application), "namespace": NAMESPACE, "num_cpus": 0}
    # Replicas wait in it for as long as it takes.
    # One that dies is replaced; whoever waited in it asks again.
    options |= {"max_concurrency": 10_000, "max_restarts": -1}
    clock = asyncio.get_running_loop().time
    end = clock() + GONE_S
    while True:
        try:
            registry: Any = ray.remote(Registry).options(**options).remote()
            async with asyncio.timeout(START_S):
                await registry.__ray_ready__.remote()
            return registry
        except ValueError:
            if clock() >= end:
                raise ServiceError(
                    f"another run trains the application {application!r}: stop it first, or name another application"
                ) from None
            await asyncio.sleep(RETRY_S)


async def _serve(pusher: WeightPusher, registry: Any) -> None:
    """Consumes applications; waits for the push that may be under way; goes on until it is cancelled."""

    async def deliver(admissions: dict[str, Admission | None]) -> None:
        await registry.answer.remote(admissions)

    while True:
        applicants: dict[str, int] = {}
        try:
            # Waiting for someone to come has no deadline: it ends with the run.
            applicants = await registry.applicants.remote()
            await pusher.admit(applicants, deliver)
        except (ServiceError, PolicyError, ray.exceptions.RayActorError) as error:
            # A learner that is lost is the loop's to replace.
            log.warning("admission of %s: %s", sorted(applicants), error)
            await asyncio.sleep(RETRY_S)
