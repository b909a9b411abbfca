"""Lets new rollout replicas in between two pushes, while the loop continues."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.policy.ranks import PolicyError
from orchestrator.push.pusher import WeightPusher
from protos import common_pb2
from services.common.weight_transfer.registry import (
    NAME_ERRORS,
    NAMESPACE,
    Answer,
    Applicant,
    Registry,
    Ticket,
    registry_name,
)
from services.common.wire.errors import LeaseLost, ServiceError, Unavailable

log = logging.getLogger("quartet")

RETRY_S = 1.0
START_S = 60
ANSWER_S = 10
WAIT_S = 10.0
"""Seconds after which the registry says that none has applied."""
GONE_S = 30
"""Seconds that Ray may take to end the registry of an earlier run of this application."""
_TRANSIENT_ERRORS = (ServiceError, PolicyError, RayError, OSError)
"""Errors that may be gone when the newcomers apply again; the loop replaces a lost learner."""


@asynccontextmanager
async def registered(application: str) -> AsyncIterator[Any]:
    """Context with a registry in which newcomers to the rollout application wait. This run holds the application; an
    earlier run's registry is therefore removed.

    Raises:
        ServiceError: an earlier registry still exists after GONE_S, or this one did not start within START_S.
    """
    registry = await _open_registry(application)
    try:
        yield registry
    finally:
        ray.kill(registry)


@asynccontextmanager
async def adding_newcomers(
    pusher: WeightPusher, registry: Any, lease: common_pb2.Lease, ttl_s: float
) -> AsyncIterator[None]:
    """Context in which newcomers to the rollout application get the last pushed version.

    A permanent error ends the block, since newcomers would otherwise wait for ever.

    Args:
        pusher: brings them the weights.
        registry: where they apply.
        lease: the run's lease of the application, under which they take the weights.
        ttl_s: seconds for which they count the run as alive.
    """
    answer = partial(Answer, lease.SerializeToString(), ttl_s)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(_serve(pusher, registry, answer))
        yield
        serving.cancel()


async def _open_registry(application: str) -> Any:
    options: dict[str, Any] = {"name": registry_name(application), "namespace": NAMESPACE, "num_cpus": 0}
    # Replicas wait in it without a deadline.
    # Ray replaces a registry that dies, and the replicas that waited in it apply again.
    options |= {"max_concurrency": 10_000, "max_restarts": -1}
    clock = asyncio.get_running_loop().time
    end = clock() + GONE_S
    while True:
        try:
            registry: Any = ray.remote(Registry).options(**options).remote()
            async with asyncio.timeout(START_S):
                await registry.__ray_ready__.remote()
            return registry
        except TimeoutError:
            ray.kill(registry)
            raise ServiceError(
                f"Ray did not start the registry of rollout replicas within {START_S} s; is the machine overloaded?"
            ) from None
        except NAME_ERRORS:
            if clock() >= end:
                raise ServiceError(
                    f"Ray has not ended the registry of an earlier run that trained the application {application!r} "
                    f"after {GONE_S:g} s; try again, or restart the cluster"
                ) from None
            with contextlib.suppress(*NAME_ERRORS):  # it has ended meanwhile, or is about to
                ray.kill(ray.get_actor(registry_name(application), namespace=NAMESPACE))
            await asyncio.sleep(RETRY_S)


async def _serve(pusher: WeightPusher, registry: Any, answer: Callable[[Ticket | None], Answer]) -> None:
    """Answers applications, each after the push in progress, until cancelled."""

    async def deliver(tickets: dict[str, Ticket | None]) -> None:
        async with asyncio.timeout(ANSWER_S):
            await registry.answer.remote({name: answer(ticket) for name, ticket in tickets.items()})

    while True:
        applicants: dict[str, Applicant] = {}
        try:
            applicants = await _applicants(registry)
            if applicants:
                await pusher.add_newcomers(applicants, deliver)
        except LeaseLost:
            raise
        except _TRANSIENT_ERRORS as error:
            log.warning("newcomers %s: %s", sorted(applicants), error)
            await asyncio.sleep(RETRY_S)


async def _applicants(registry: Any) -> dict[str, Applicant]:
    """The replicas that wait in the registry; empty if none came within WAIT_S. Unavailable if the registry stands
    still: it is ended, and Ray starts another, to which replicas apply again."""
    try:
        async with asyncio.timeout(WAIT_S + ANSWER_S):
            waiting: dict[str, Applicant] = await registry.applicants.remote(WAIT_S)
            return waiting
    except TimeoutError:
        ray.kill(registry, no_restart=False)
        raise Unavailable("the registry of rollout replicas stands still; Ray starts another") from None
