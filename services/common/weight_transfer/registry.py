"""Where new rollout replicas ask for the weights of the training run that goes on.

A small Ray actor with a name, owned by the orchestrator: while it lives there is a run. A replica that is not RUNNING
yet cannot be reached through Serve, so it comes here, and the learner sends it the weights that were last pushed.
"""

import asyncio
from dataclasses import dataclass

NAMESPACE = "quartet"


def registry_name(application: str) -> str:
    """Name of the registry of the run that trains this rollout application."""
    return f"weights of {application}"


@dataclass(frozen=True, slots=True)
class Admission:
    """What a newcomer needs to receive the current weights."""

    prepare: bytes
    """rollout_pb2.Prepare: the newcomers' own group."""
    transfer: bytes
    """rollout_pb2.Transfer"""
    commit: bytes
    """rollout_pb2.Commit: the version."""
    checksum: str
    """Of the bytes as they were pushed; empty where the backend keeps none."""
    timeout_s: float
    """Deadline of each phase."""


class Registry:
    """Brings applicants and admissions together. Runs as an asynchronous Ray actor."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, asyncio.Future[Admission | None]]] = {}
        self._arrived = asyncio.Event()

    async def apply(self, replica: str, workers: int) -> Admission | None:
        """Called by a replica; waits for its admission. None: no version was pushed yet, begin with your own."""
        if replica in self._waiting:
            self._waiting.pop(replica)[1].cancel()
        answer: asyncio.Future[Admission | None] = asyncio.get_running_loop().create_future()
        self._waiting[replica] = (workers, answer)
        self._arrived.set()
        return await answer

    async def applicants(self) -> dict[str, int]:
        """Called by the orchestrator; waits until there are any: their workers by name."""
        await self._arrived.wait()
        return {replica: workers for replica, (workers, _) in self._waiting.items()}

    async def answer(self, admissions: dict[str, Admission | None]) -> None:
        """Called by the orchestrator: lets these applicants go on."""
        for replica, admission in admissions.items():
            _, answer = self._waiting.pop(replica, (0, None))
            if answer is not None and not answer.done():
                answer.set_result(admission)
        if not self._waiting:
            self._arrived.clear()
