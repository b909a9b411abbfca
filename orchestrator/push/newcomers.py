"""Lets new rollout replicas in between two pushes, while the loop continues."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayError, RaySystemError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.push.pusher import WeightPusher
from protos import common_pb2
from quartet.ranks.group import RanksLost
from quartet.threads import in_thread
from quartet.weight_transfer.registry import (
    NAME_ERRORS,
    NAMESPACE,
    Answer,
    Applicant,
    Registry,
    Ticket,
    registries,
    registry_name,
)
from quartet.wire.errors import LeaseLost, ServiceError, Unavailable

log = logging.getLogger("quartet")

RETRY_S = 1.0
LOOK_S = 0.5
"""Seconds between two looks whether a replica that joins has died."""
START_S = 60
"""Seconds within which a registry has to start."""
ANSWER_S = 10
"""Seconds within which a registry has to answer, and Ray for ending those that are left."""
WAIT_S = 2.0
"""Seconds after which the registry says that none has applied."""
_THREAD = "registry of rollout replicas"
_TRANSIENT_ERRORS = (ServiceError, RanksLost, RayError, OSError)
"""Errors that may be gone when the newcomers apply again; the loop replaces a lost learner."""


class Again(Protocol):
    """Calls something again after losses, and decides how often. It gets the seconds that one try may take, and what
    to tell the user of a first try that is long."""

    async def __call__(self, ask: Callable[[float], Awaitable[Any]], /, *, reason: str) -> Any: ...


class Desk:
    """Desk where newcomers wait for a run: a registry, and the next one when that does not answer.

    Newcomers apply to the registry with the highest number. A run opens the number after its own and ends what is
    below, so one that was taken over, and does not know it yet, ends no registry of the other's.

    Calls that wait for Ray's GCS are made in threads: however long it takes, the run's leases are renewed.
    """

    def __init__(self, application: str) -> None:
        self._application = application
        self._number = 0
        self._registry: Any = None
        self._answers = False

    async def open(self) -> None:
        """Opens the next registry, and ends those before it, also of an earlier run.

        Raises:
            Unavailable: it did not start within START_S, or another run has opened it.
        """
        registry: Any = None
        try:
            async with asyncio.timeout(START_S):
                # One that Ray begins to start after the deadline ends with its handle, which nothing keeps.
                number, registry = await in_thread(self._begun, _THREAD)
                await registry.__ray_ready__.remote()
        except (TimeoutError, RayError, ValueError) as error:
            if registry is not None:
                ray.kill(registry)
            why = _why(error, START_S)
            raise Unavailable(
                f"Ray did not start the registry of rollout replicas {why}; is the machine overloaded?"
            ) from None
        self._number, self._registry, self._answers = number, registry, True
        await self._end(number)

    def _begun(self) -> tuple[int, Any]:
        """The next registry, which starts, with its number before it."""
        number = 1 + (self._number or max(registries(self._application), default=0))
        if not ray.is_initialized():  # the run is over; to make an actor now, Ray would start a cluster of its own
            raise RaySystemError("disconnected meanwhile")
        name = registry_name(self._application, number)
        options: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "num_cpus": 0}
        # Beside the run, so that no other node takes it along.
        beside = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        # Newcomers wait in it without a deadline. One that dies keeps its name, as Ray starts it again: without any,
        # a newcomer would begin with weights of its own.
        options |= {"scheduling_strategy": beside, "max_concurrency": 10_000, "max_restarts": -1}
        return number, ray.remote(Registry).options(**options).remote()

    async def close(self) -> None:
        """Ends the registry, unless Ray takes too long; then it ends with the run."""
        await self._end(self._number + 1)

    async def applicants(self) -> dict[str, Applicant]:
        """The replicas that wait in the registry; empty if none came within WAIT_S.

        Raises:
            Unavailable: it does not answer, so that the next call opens another; or that did not start.
        """
        if not self._answers:
            await self.open()
        waiting: dict[str, Applicant] = await self._call("applicants", WAIT_S + ANSWER_S, WAIT_S)
        return waiting

    async def answer(self, answers: dict[str, Answer]) -> None:
        """Gives these applicants their answers. Raises Unavailable if the registry does not take them."""
        await self._call("answer", ANSWER_S, answers)

    async def _call(self, method: str, timeout_s: float, argument: Any) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self._registry, method).remote(argument)
        except (TimeoutError, RayError) as error:
            self._answers = False
            raise Unavailable(
                f"their registry did not answer {_why(error, timeout_s)}; another takes its place"
            ) from None

    async def _end(self, below: int) -> None:
        # One that Ray does not name now ends with its run, and until then no replica applies to it.
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(ANSWER_S):
                for number in await in_thread(partial(registries, self._application), _THREAD):
                    if number < below:
                        name = registry_name(self._application, number)
                        with contextlib.suppress(*NAME_ERRORS):  # it has ended meanwhile, or is about to
                            ray.kill(await in_thread(partial(ray.get_actor, name, NAMESPACE), _THREAD))


def _why(error: Exception, within_s: float) -> str:
    """Ends a sentence about what did not happen. Ray adds lines with names of its own to its errors."""
    reason = str(error).partition("\n")[0]
    return f"within {within_s:g} s" if isinstance(error, TimeoutError) else f"({reason})"


@asynccontextmanager
async def registered(application: str, again: Again) -> AsyncIterator[Desk]:
    """Context with a desk for newcomers to the rollout application, which this run holds. `again` repeats a start of
    its registry that fails.

    Raises:
        Unavailable: the registry did not start within START_S.
    """
    desk = Desk(application)
    await again(lambda _: desk.open(), reason="Ray has not started the registry of rollout replicas yet")
    try:
        yield desk
    finally:
        await desk.close()


class Newcomers:
    """New rollout replicas, which come at any time while a run holds the application.

    While a pusher brings them its weights they begin with the last version that it pushed. At any other time they
    begin with weights of their own, and take part in the next push: a run that begins, or goes back to a checkpoint,
    waits for replicas itself.
    """

    def __init__(self, desk: Desk, lease: Callable[[], common_pb2.Lease], ttl_s: float) -> None:
        """
        Args:
            desk: where they apply.
            lease: gives the lease that the run holds, under which they take weights.
            ttl_s: seconds for which they count the run as alive.
        """
        self._desk, self._lease, self._ttl_s = desk, lease, ttl_s
        self._pusher: WeightPusher | None = None
        self._taking: asyncio.Task[None] | None = None
        self._without: set[str] = set()
        """Replicas that began with weights of their own, as there was no pusher."""

    @asynccontextmanager
    async def brought_by(self, pusher: WeightPusher) -> AsyncIterator[None]:
        """Context in which they get the pusher's weights."""
        self._pusher = pusher
        pusher.joined(self._without)
        self._without = set()
        try:
            yield
        finally:
            self._pusher = None
            if self._taking is not None:  # they apply again
                self._taking.cancel()
                await asyncio.wait({self._taking})

    async def take(self) -> None:
        """Answers applications, each after the push in progress, until cancelled. Raises what does not mend itself,
        since newcomers would otherwise wait for ever."""
        while True:
            applicants: dict[str, Applicant] = {}
            try:
                applicants = await self._desk.applicants()
                if applicants:
                    await self._taken(applicants)
            except LeaseLost:
                raise
            except _TRANSIENT_ERRORS as error:
                # Ray adds lines with names of its own.
                reason = str(error).partition("\n")[0]
                joining = f" ({', '.join(sorted(applicants))})" if applicants else ""
                log.warning("rollout replicas that join%s: %s", joining, reason)
                await asyncio.sleep(RETRY_S)

    async def _taken(self, applicants: dict[str, Applicant]) -> None:
        """Returns when they are answered, and have weights, or when their pusher is closed."""
        if self._pusher is None:
            await self._deliver(dict.fromkeys(applicants))
            self._without |= applicants.keys()
            return
        adding = self._pusher.add_newcomers(applicants, self._deliver, first_death)
        self._taking = taking = asyncio.ensure_future(adding)
        try:
            await asyncio.wait({taking})
        finally:
            taking.cancel()
            await asyncio.wait({taking})
        if not taking.cancelled():
            taking.result()

    async def _deliver(self, tickets: dict[str, Ticket | None]) -> None:
        lease = self._lease().SerializeToString()
        await self._desk.answer({name: Answer(lease, self._ttl_s, ticket) for name, ticket in tickets.items()})


@asynccontextmanager
async def taking_newcomers(
    desk: Desk, lease: Callable[[], common_pb2.Lease], ttl_s: float
) -> AsyncIterator[Newcomers]:
    """Context in which newcomers to the rollout application are answered, in which a permanent error ends the block.
    Arguments as of Newcomers."""
    newcomers = Newcomers(desk, lease, ttl_s)
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(newcomers.take())
        yield newcomers
        taking.cancel()


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
