"""The process that holds the sessions of an application, and how its replicas ask it.

Requests of one session reach any replica, and a replica may be replaced. The sessions are therefore held by an actor
beside them, which the first session starts: a replica that dies takes the answers that it was making with it, and no
tokens of a session. If the actor dies, each later call of its sessions is refused by name.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from quartet.trajectory import Segment
from quartet.weight_transfer.registry import NAME_ERRORS, NAMESPACE
from quartet.wire.codec import Ints
from quartet.wire.errors import NotFound, ResourceExhausted, ServiceError, Unavailable
from services.rollout.sessions import Begun, Recorded, Sessions

ANSWER_S = 10.0
"""Longest wait for the holder's answer, in seconds."""
START_S = 60.0
"""Longest wait for its start, in seconds."""
_Refusal = tuple[type[ServiceError], str, float | None]


class SessionStore(Protocol):
    """Sessions that a door asks."""

    async def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of Sessions. Raises what it raises; Unavailable if it does not answer."""

    async def counts(self) -> dict[str, int]:
        """`Sessions.counts`; empty if there have been no sessions."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The session that a request belongs to."""

    store: SessionStore
    owner: str
    """Name of the caller that started it."""
    name: str

    async def begun(self, digests: Sequence[bytes]) -> tuple[Begun, float]:
        """See Sessions.begun."""
        begun: tuple[Begun, float] = await self.store.ask("begun", self.owner, self.name, digests)
        return begun

    async def record(self, interaction: str, prompt_ids: Ints, response: Segment, digest: bytes) -> Recorded:
        """See Sessions.record."""
        args = self.owner, self.name, interaction, prompt_ids, response, digest
        recorded: Recorded = await self.store.ask("record", *args)
        return recorded


class SessionHolder:
    """The actor."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    def ask(self, method: str, *args: Any) -> tuple[_Refusal | None, Any]:
        """The refusal, and what a method of Sessions returns: Ray would put a trace into the text of an error."""
        try:
            return None, getattr(self._sessions, method)(*args)
        except ResourceExhausted as error:
            return (ResourceExhausted, str(error.args[0]), error.retry_after_s), None
        except ServiceError as error:
            return (type(error), str(error), None), None

    def counts(self) -> dict[str, int]:
        """Numbers for the metrics."""
        return self._sessions.counts


class HeldSessions:
    """The sessions of an application, asked by one of its replicas."""

    def __init__(self, application: str) -> None:
        self._name = f"sessions of {application}"
        self._holder: Any = None

    async def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of Sessions. See SessionStore."""
        holder = await self._found(start=method == "start")
        if holder is None:
            raise NotFound("no session was started here, or the process that held them has died, with their tokens")
        try:
            async with asyncio.timeout(ANSWER_S):
                refusal, value = await holder.ask.remote(method, *args)
        except TimeoutError:
            raise Unavailable(f"the process that holds the sessions did not answer within {ANSWER_S:g} s") from None
        except RayActorError:
            self._holder = None
            raise Unavailable("the process that held the sessions has died, and their tokens are lost") from None
        if refusal is not None:
            kind, message, retry_after_s = refusal
            raise ResourceExhausted(message, retry_after_s) if kind is ResourceExhausted else kind(message)
        return value

    async def counts(self) -> dict[str, int]:
        """`Sessions.counts`; empty if there have been no sessions, or their holder does not answer."""
        holder = await self._found(start=False)
        if holder is None:
            return {}
        try:
            async with asyncio.timeout(ANSWER_S):
                counted: dict[str, int] = await holder.counts.remote()
                return counted
        except (TimeoutError, RayActorError):
            self._holder = None
            return {}

    async def _found(self, *, start: bool) -> Any:
        """The actor, started if need be; None if there is none."""
        if self._holder is None:
            self._holder = await asyncio.to_thread(self._started if start else self._existing)
            if start:
                async with asyncio.timeout(START_S):
                    await self._holder.__ray_ready__.remote()
        return self._holder

    def _existing(self) -> Any:
        try:
            return ray.get_actor(self._name, namespace=NAMESPACE)
        except NAME_ERRORS:
            return None

    def _started(self) -> Any:
        # Detached, since it would otherwise end with the replica that starts it. It ends with the cluster.
        options: dict[str, Any] = {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        return ray.remote(SessionHolder).options(**options, get_if_exists=True, max_restarts=0).remote()
