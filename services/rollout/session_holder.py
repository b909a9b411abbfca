"""The process that holds the sessions of an application, and how its replicas ask it.

Requests of one session reach any replica, and a replica may be replaced. The sessions are therefore held by an actor
beside them, which the first session starts: a replica that dies takes the answers that it was making with it, and no
tokens of a session. If the actor dies, each later call of its sessions is refused by name.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, RayActorError

from quartet.threads import in_thread
from quartet.trajectory import Segment
from quartet.weight_transfer.registry import NAME_ERRORS, NAMESPACE
from quartet.wire.codec import Ints
from quartet.wire.errors import NotFound, ServiceError, Unavailable
from services.rollout.sessions import Admitted, Recorded, Sessions

ANSWER_S = 10.0
"""Longest wait for the holder's answer, in seconds."""
START_S = 60.0
"""Longest wait for the answer where it may have to be started first."""
_STARTS = frozenset({"start", "start_all"})
"""Methods that start the holder where there is none."""
PAUSE_S = 0.2
"""Seconds between two tries to start it in the place of one that has died, whose name Ray keeps for a moment."""


class SessionStore(Protocol):
    """Sessions that a door asks."""

    tokenizer: str
    """Hash of the tokenizer whose tokens are recorded."""

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

    async def begun(self, digests: Sequence[bytes]) -> Admitted:
        """The tokens on which a request goes on. See Sessions.begun."""
        begun: Admitted = await self.store.ask("begun", self.owner, self.name, digests, self.store.tokenizer)
        return begun

    async def leave(self, turn: int, *, full: bool = False) -> None:
        """Notes that a request ended without a response, unless the session is gone. See Sessions.leave."""
        with suppress(ServiceError):
            await self.store.ask("leave", self.owner, self.name, turn, full)

    async def record(
        self, interaction: str, prompt_ids: Ints, response: Segment, digest: bytes, checksum: str, finish_reason: str
    ) -> Recorded:
        """Has the session hold a response. See Sessions.record."""
        args = self.owner, self.name, interaction, prompt_ids, response, digest, checksum, finish_reason
        recorded: Recorded = await self.store.ask("record", *args)
        return recorded


class SessionHolder:
    """A Ray actor that holds an application's sessions."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    def ask(self, method: str, *args: Any) -> tuple[ServiceError | None, Any]:
        """The refusal, and what a method of Sessions returns: Ray would put a trace into the text of an error."""
        try:
            return None, getattr(self._sessions, method)(*args)
        except ServiceError as error:
            return error, None


class HeldSessions:
    """The sessions of an application, asked by one of its replicas."""

    def __init__(self, application: str, tokenizer: str) -> None:
        """
        Args:
            application: its name.
            tokenizer: hash of the tokenizer of its model.
        """
        self._name, self.tokenizer = f"sessions of {application}", tokenizer
        self._holder: Any = None
        self._searching = asyncio.Lock()

    async def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of Sessions. See SessionStore."""
        starts = method in _STARTS
        try:
            async with asyncio.timeout(START_S if starts else ANSWER_S):
                refusal, value = await self._asked(method, args, starts=starts)
        except TimeoutError:
            raise Unavailable("the process that holds the sessions did not answer in time") from None
        except RayActorError:
            raise Unavailable("the process that held the sessions has died, and their tokens are lost") from None
        if refusal is not None:
            raise refusal
        return value

    async def _asked(self, method: str, args: tuple[Any, ...], *, starts: bool) -> tuple[ServiceError | None, Any]:
        """The holder's answer. A session may be started by another holder, if one has died."""
        while True:
            found_before = self._holder is not None
            holder = await self._found(self._started if starts else self._existing)
            if holder is None:
                raise NotFound(
                    "no session was started here, or the process that held them has died, with their tokens"
                )
            try:
                answer: tuple[ServiceError | None, Any] = await holder.ask.remote(method, *args)
                return answer
            except RayActorError as error:
                self._holder = None
                # Another replica may have started a holder since this one found the one that has died. One that does
                # not answer may have done what it was asked for.
                if not starts and not (found_before and isinstance(error, ActorDiedError)):
                    raise
            await asyncio.sleep(PAUSE_S)

    async def counts(self) -> dict[str, int]:
        """`Sessions.counts`; empty if there have been no sessions, or their holder does not answer."""
        try:
            counted: dict[str, int] = await self.ask("counts")
            return counted
        except (NotFound, Unavailable):
            return {}

    async def _found(self, find: Callable[[], Any]) -> Any:
        """The holder, if it is known or `find` finds it; one search at a time, in a thread of its own, as each lasts
        for as long as Ray's GCS is silent."""
        async with self._searching:
            if self._holder is None:
                self._holder = await in_thread(find, "holder of sessions")
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
