"""The rollout replicas of a push, which carry out each phase together."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from orchestrator.config.weights import WeightsConfig
from protos import rollout_pb2 as pb
from services.common.wire.errors import LeaseLost, ServiceError, Unavailable
from services.rollout.client import RolloutClient

log = logging.getLogger("quartet")


class Missing(Unavailable):
    """Members did not answer a phase, or could not carry it out."""

    def __init__(self, text: str, silent: Collection[str]) -> None:
        super().__init__(text)
        self.silent = frozenset(silent)
        """Members that did not answer."""


class Misfit(ServiceError):
    """The policy's weights do not fit the rollout replicas' model. Nothing was sent."""


class Replicas:
    """Carries phases out on all members at once, each with a deadline."""

    def __init__(self, rollout: RolloutClient, config: WeightsConfig) -> None:
        self._rollout = rollout
        self._config = config

    async def discover(
        self, manifest: bytes, members: Collection[str], pause: Callable[[], Awaitable[None]]
    ) -> list[pb.WeightReport]:
        """Asks all replicas whether they can take this manifest. Without replicas, waits for the first, which Serve
        may be about to start, with a `pause` between two tries. Others than `members`, the replicas of the last push,
        get less time.

        Raises:
            Misfit: a replica's model has other weights.
            ServiceError: no replica came within weights.patience_s.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + self._config.patience_s
        while True:
            try:
                reports = await self._rollout.update_weights(
                    self._config.control_s, members=members, discover=pb.Discover(manifest=manifest)
                )
                unable = "; ".join(f"{report.replica}: {report.error}" for report in reports)
                failure: ServiceError = Unavailable(
                    f"no rollout replica can take weights: {unable}" if unable else "no rollout replica answers"
                )
            except ServiceError as error:
                reports, failure = [], error
            if misfits := [f"{report.replica}: {report.misfit}" for report in reports if report.misfit]:
                raise Misfit(f"the policy cannot be pushed to the rollout service: {misfits[0]}")
            # A replica that could not roll back reports that, and Serve replaces it.
            if able := [report for report in reports if report.ok]:
                return able
            if clock() >= end:
                raise failure
            await pause()

    async def phase(self, members: Collection[str], timeout_s: float, **phase: Any) -> list[pb.WeightReport]:
        """Carries out one phase on all members; Missing unless each succeeds."""
        reports = await self._rollout.update_weights(timeout_s, members=members, **phase)
        # Replicas that have come since report that they are not members; only members count.
        failures = [f"{r.replica}: {r.error}" for r in reports if not r.ok and r.replica in members]
        missing = set(members) - {report.replica for report in reports}
        failures += [f"{replica}: did not answer {next(iter(phase))}" for replica in sorted(missing)]
        if failures:
            raise Missing("; ".join(failures), missing)
        return [report for report in reports if report.replica in members]

    async def prepare(self, members: Collection[str], prepare: pb.Prepare) -> None:
        """Carries out prepare. Waiting for requests to finish may take as long as a transfer; forming a group may
        not."""
        config = self._config
        forming_s = config.stall_s + config.control_s
        timeout_s = max(config.timeout_s, forming_s) if config.in_flight == "wait" else forming_s
        await self.phase(members, timeout_s, prepare=prepare)

    async def abort(self, membership: int, members: Collection[str]) -> list[pb.WeightReport]:
        """Rolls back all replicas; returns the reports of those that did. Others than `members` get less time."""
        try:
            reports = await self._rollout.update_weights(
                self._config.control_s, members=members, abort=pb.Abort(membership=membership)
            )
        except ServiceError as error:
            # Replicas also roll back by themselves when a phase fails, and a lost one needs no abort.
            log.warning("roll-back: %s", error)
            return []
        return [report for report in reports if report.ok]

    async def rest(self, at_most_s: float) -> None:
        """Pauses all replicas until the next push. One that fails keeps its memory, and is part of the next push.

        Raises:
            LeaseLost: another run has taken the replicas over.
        """
        try:
            reports = await self._rollout.update_weights(self._config.commit_s, rest=pb.Rest(at_most_s=at_most_s))
            failures = [f"{report.replica}: {report.error}" for report in reports if not report.ok]
        except LeaseLost:
            raise
        except ServiceError as error:
            failures = [str(error)]
        if failures:
            log.warning("replicas keep their memory during the update: %s", "; ".join(failures))

    async def score(self, members: Collection[str], probe: pb.Probe) -> list[pb.WeightReport]:
        """The members' scores of the probe's sequences; empty if the call fails."""
        try:
            return await self._rollout.update_weights(self._config.timeout_s, members=members, probe=probe)
        except ServiceError as error:
            log.warning("probe: %s", error)
            return []
