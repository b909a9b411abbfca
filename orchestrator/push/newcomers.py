"""Lets new rollout replicas in between two pushes, while the loop continues."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError

from orchestrator.push.pusher import WeightPusher
from protos import common_pb2
from quartet.ranks.group import RanksLost
from quartet.weight_transfer.registry import (
    NAME_ERRORS,
    NAMESPACE,
    Answer,
    Applicant,
    Registry,
    Ticket,
    registry_name,
)
from quartet.wire.errors import LeaseLost, ServiceError, Unavailable

log = logging.getLogger("quartet")

RETRY_S = 1.0
LOOK_S = 0.5
"""Seconds between two looks whether a replica that joins has died."""
START_S = 60
"""Seconds within which a registry has to start; each start that takes longer doubles them for the next, so that a
busy machine is not kept busy with starts that are given up."""
ANSWER_S = 10
"""Seconds within which a registry that has started has to answer."""
WAIT_S = 10.0
"""Seconds after which the registry says that none has applied."""
GONE_S = 30
"""Seconds that Ray may take to end the registry of an earlier run of this application."""
_TRANSIENT_ERRORS = (ServiceError, RanksLost, RayError, OSError)
"""Errors that may be gone when the newcomers apply again; the loop replaces a lost learner."""


class Again(Protocol):
    """Calls something again after losses, and decides how often. It gets the seconds that one try may take."""

    async def __call__(self, ask: Callable[[float], Awaitable[Any]], /) -> Any: ...


async def once(ask: Callable[[float], Awaitable[Any]]) -> Any:
    """Calls it once."""
    return await ask(START_S)


@asynccontextmanager
async def registered(application: str, again: Again = once) -> AsyncIterator[Any]:
    """Context with a registry in which newcomers to the rollout application wait. This run holds the application; an
    earlier run's registry is therefore removed. `again` repeats a start that fails.

    Raises:
        ServiceError: an earlier registry still exists after GONE_S, or this one did not start within START_S.
    """
    registry = await again(lambda _: _open_registry(application))
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
        registry: Any = None
        try:
            registry = ray.remote(Registry).options(**options).remote()
            async with asyncio.timeout(START_S):
                await registry.__ray_ready__.remote()
            return registry
        except NAME_ERRORS:
            if clock() >= end:
                raise Unavailable(
                    f"Ray has not ended the registry of an earlier run that trained the application {application!r} "
                    f"after {GONE_S:g} s; try again, or restart the cluster"
                ) from None
            with contextlib.suppress(*NAME_ERRORS):  # it has ended meanwhile, or is about to
                ray.kill(ray.get_actor(registry_name(application), namespace=NAMESPACE))
            await asyncio.sleep(RETRY_S)
        except (TimeoutError, RayError) as error:
            if registry is not None:
                ray.kill(registry)
            reason = str(error).partition("\n")[0]
            why = f"within {START_S} s" if isinstance(error, TimeoutError) else f"({reason})"
            raise Unavailable(
                f"Ray did not start the registry of rollout replicas {why}; is the machine overloaded?"
            ) from None


async def _serve(pusher: WeightPusher, registry: Any, answer: Callable[[Ticket | None], Answer]) -> None:
    """Answers applications, each after the push in progress, until cancelled."""

    desk = _Desk(registry)

    async def deliver(tickets: dict[str, Ticket | None]) -> None:
        await desk.answer({name: answer(ticket) for name, ticket in tickets.items()})

    while True:
        applicants: dict[str, Applicant] = {}
        try:
            applicants = await desk.applicants()
            if applicants:
                await pusher.add_newcomers(applicants, deliver, first_death)
        except LeaseLost:
            raise
        except _TRANSIENT_ERRORS as error:
            # Ray adds lines with names of its own.
            reason = str(error).partition("\n")[0]
            joining = f" ({', '.join(sorted(applicants))})" if applicants else ""
            log.warning("rollout replicas that join%s: %s", joining, reason)
            await asyncio.sleep(RETRY_S)


async def first_death(applicants: Mapping[str, Applicant]) -> str:
    """The name of the first of these replicas that Ray says has died. One that does not answer has not."""
    while True:
        await asyncio.sleep(LOOK_S)
        looks = await asyncio.gather(*(_has_died(applicant.actor) for applicant in applicants.values()))
        for name, dead in zip(applicants, looks, strict=True):
            if dead:
                return name


async def _has_died(actor: Any) -> bool:
    try:
        async with asyncio.timeout(LOOK_S):
            await actor.__ray_ready__.remote()
    except ActorDiedError:
        return True
    except (TimeoutError, RayError):
        pass  # it is busy, stands still, or Ray does not know
    return False


class _Desk:
    """The registry as its run calls it. One that stands still is ended; Ray starts another, to which replicas apply
    again, and which is called only once it has started."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._started = True
        self._start_s: float = START_S

    async def applicants(self) -> dict[str, Applicant]:
        """The replicas that wait in the registry; empty if none came within WAIT_S.

        Raises:
            Unavailable: the registry stood still, or its successor did not start in time.
            RayError: it has ended.
        """
        waiting: dict[str, Applicant] = await self._call("applicants", WAIT_S + ANSWER_S, WAIT_S)
        return waiting

    async def answer(self, answers: dict[str, Answer]) -> None:
        """Gives these applicants their answers. Raises like `applicants`."""
        await self._call("answer", ANSWER_S, answers)

    async def _call(self, method: str, timeout_s: float, argument: Any) -> Any:
        if not self._started:
            await self._start()
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self._registry, method).remote(argument)
        except TimeoutError:
            self._end()
            raise Unavailable("the registry of rollout replicas stands still; Ray starts another") from None
        except RayError:
            self._started = False
            raise

    async def _start(self) -> None:
        """Returns when the successor answers its first call, which comes after its constructor."""
        try:
            async with asyncio.timeout(self._start_s):
                while not self._started:
                    try:
                        await self._registry.__ray_ready__.remote()
                        self._started = True
                    except RayError:  # calls fail while the one before ends
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            waited_s, self._start_s = self._start_s, 2 * self._start_s
            self._end()
            raise Unavailable(
                f"the registry of rollout replicas did not start within {waited_s:g} s; if a signal has stopped its "
                "process, ray::Registry, end that"
            ) from None
        self._start_s = START_S

    def _end(self) -> None:
        self._started = False
        ray.kill(self._registry, no_restart=False)
