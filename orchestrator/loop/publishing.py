"""Publishes new weights: before the loop goes on, or beside it."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.config.run import OrchestratorConfig
from orchestrator.experience.beside import Beside
from orchestrator.push.pusher import PushReport


class Pusher(Protocol):
    """The methods of the weight push that the loop uses."""

    async def push(self, version: int) -> PushReport:
        """Brings every rollout replica to `version`."""

    async def rest(self, at_most_s: float) -> None:
        """Pauses the replicas until the next push, so that the learners can use their memory."""

    async def stage(self, version: int) -> Any:
        """Copies the policy's weights as `version`."""

    async def deliver(self, staged: Any) -> PushReport:
        """Brings every rollout replica to the weights that were staged."""

    async def complete(self) -> None:
        """Brings the replicas that joined too late for the last push to its version."""


class Publishing:
    """Brings versions to the replicas, one after the other.

    At lock-step `publish` returns when they serve the version. Else it returns when the weights are copied, and the
    copy is delivered while the loop takes the next batch and trains. A failed delivery ends the loop at once.
    """

    def __init__(
        self, pusher: Pusher, beside: Beside, committed: Callable[[int], None], config: OrchestratorConfig
    ) -> None:
        """`committed` is called with each version that all replicas serve."""
        self._pusher = pusher
        self._beside = beside
        self._committed = committed
        self._overlaps = config.loop.max_staleness > 0
        self._rest_s = config.timeouts.longest_update_s if config.loop.colocate else None
        self._delivery: asyncio.Task[None] | None = None
        self._seconds = 0.0
        self._proved: dict[str, float] = {}

    async def rest(self) -> None:
        """With loop.colocate: pauses the replicas until the next `publish`, so that the learners get their memory."""
        if self._rest_s is not None:
            await self._pusher.rest(self._rest_s)

    async def publish(self, version: int) -> None:
        """Publishes the policy's present weights as `version`."""
        if not self._overlaps:
            self._commit(await self._pusher.push(version))
            return
        await self.settled()
        staged = await self._pusher.stage(version)
        self._delivery = self._beside.start(self._deliver(staged), f"delivery of version {version}")

    def measured(self) -> dict[str, float]:
        """Metrics of the last push that has ended: its seconds, from the copy to the commit; and what the last proof
        measured, if it was given since this was last asked."""
        proved, self._proved = self._proved, {}
        return {"seconds/push": self._seconds} | proved

    async def settled(self) -> None:
        """Returns when all replicas serve the version that was published last."""
        if self._delivery:
            await asyncio.wait([self._delivery])  # a failure comes as a cancellation, and `beside` raises it

    async def _deliver(self, staged: Any) -> None:
        self._commit(await self._pusher.deliver(staged))

    def _commit(self, report: PushReport) -> None:
        self._seconds = report.seconds
        if report.difference is not None:
            self._proved = {"push/difference": report.difference}
        self._committed(report.policy_version)
