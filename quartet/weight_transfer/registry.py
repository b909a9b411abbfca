"""The registry where new rollout replicas ask for the weights of the current training run.

A small named Ray actor, owned by the orchestrator. It lives as long as the run, or until it does not answer and
another takes its place. Serve does not route calls to a replica that is not RUNNING yet, so the replica applies here,
and the learner sends it the weights that were pushed last.
"""

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import Any

from ray.util import list_named_actors

from quartet.weight_transfer.place import Place
from quartet.weight_transfer.probe import Probe

NAMESPACE = "quartet"
NAME_ERRORS = (ValueError, AssertionError)
"""Errors of Ray about an actor's name: it exists already; it does not exist; or (AssertionError) the run that opened
it has ended, so that Ray has forgotten its class, and will end the actor in a moment."""


def registry_name(application: str, number: int) -> str:
    """Name of a registry of the run that trains this rollout application."""
    return f"weights of {application} {number}"


def registries(application: str) -> list[int]:
    """Numbers of the application's registries, also of those that start or stand still. New replicas apply to the one
    with the highest; where there is none, no run trains the application."""
    pattern = re.compile(rf"weights of {re.escape(application)} (\d+)")
    named = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return sorted(int(found[1]) for name in named if (found := pattern.fullmatch(name)))


@dataclass(frozen=True, slots=True)
class Applicant:
    """A replica that asks for the current weights."""

    workers: int
    """Number of its processes that take part in a push."""
    place: Place
    actor: Any = None
    """Handle of its actor at Ray, by which the run notices its death; None outside of Ray."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Everything that a newcomer needs to receive the current weights."""

    prepare: bytes
    """A packed rollout_pb2.Prepare: the newcomers' own group."""
    transfer: bytes
    """A packed rollout_pb2.Transfer."""
    commit: bytes
    """A packed rollout_pb2.Commit, which holds the version."""
    checksum: str
    """Checksum of the pushed bytes; empty if the backend has none."""
    timeout_s: float
    """Deadline of each phase in seconds."""
    probe: Probe | None = None
    """The log-probs that the newcomer should compute afterwards; None if they are not compared."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The run's answer to an applicant."""

    lease: bytes
    """A packed common_pb2.Lease: the one that the run holds now, and whose number is the timeline of the weights.
    Without it the replica would serve the first run that calls it."""
    ttl_s: float
    """Seconds for which the run counts as alive."""
    ticket: Ticket | None
    """The way to the weights; None if no version was pushed yet, so that the replica keeps those that it loaded."""


class Registry:
    """Brings applicants and answers together. Runs as an asynchronous Ray actor."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Applicant, asyncio.Future[Answer]]] = {}
        self._arrived = asyncio.Event()

    async def apply(self, replica: str, applicant: Applicant) -> Answer:
        """Called by a replica; waits for its answer."""
        if replica in self._waiting:
            self._waiting.pop(replica)[1].cancel()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[replica] = (applicant, answer)
        self._arrived.set()
        return await answer

    async def applicants(self, wait_s: float) -> dict[str, Applicant]:
        """Called by the orchestrator; waits until at least one replica has applied, at most `wait_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._arrived.wait()
        return {replica: applicant for replica, (applicant, _) in self._waiting.items()}

    async def answer(self, answers: dict[str, Answer]) -> None:
        """Called by the orchestrator: gives these applicants their answers."""
        for replica, its in answers.items():
            _, waiting = self._waiting.pop(replica, (None, None))
            if waiting is not None and not waiting.done():
                waiting.set_result(its)
        if not self._waiting:
            self._arrived.clear()
