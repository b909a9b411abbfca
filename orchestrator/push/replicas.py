"""The rollout replicas of a push, which carry out each phase together."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from orchestrator.config.weights import WeightsConfig
from protos import rollout_pb2 as pb
from quartet.wire.backoff import Deadline
from quartet.wire.errors import LeaseLost, ServiceError, Unavailable
from services.rollout.client import RolloutClient

log = logging.getLogger("quartet")

ASK_EVERY_S = 1.0
"""Seconds during a phase before its members are asked whether they still answer, and between an answer and the next
question."""
ANSWER_S = 2.0
"""Seconds that they have to answer, which takes no work; the replica that passes the question on waits one more."""
MISSED = 2
"""Questions in a row that a member leaves without an answer, after which it counts as frozen."""


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

    def tell_proof(self, version: int, difference: float) -> None:
        """Has the phases that follow, renewals of the lease among them, tell the replicas of the last proof."""
        self._rollout.proved = pb.Proof(policy_version=version, difference=difference)

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
        deadline = Deadline(self._config.patience_s)
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
                raise Misfit(
                    f"the policy cannot be pushed to the rollout service: {misfits[0]}; deploy the run's file, which "
                    "starts replicas with its model and adapters"
                )
            # A replica that could not roll back reports that, and Serve replaces it.
            if able := [report for report in reports if report.ok]:
                return able
            if deadline.passes_within(0):
                raise failure
            await pause()

    async def phase(self, members: Collection[str], timeout_s: float, **phase: Any) -> list[pb.WeightReport]:
        """Carries out one phase on all members; Missing unless each succeeds. One that stands still is found long
        before a deadline that allows for the work."""
        reports = await self._heard(timeout_s, members, **phase)
        # Replicas that have come since report that they are not members; only members count.
        failures = [f"{r.replica}: {r.error}" for r in reports if not r.ok and r.replica in members]
        missing = set(members) - {report.replica for report in reports}
        failures += [f"{replica}: did not answer {next(iter(phase))}" for replica in sorted(missing)]
        if failures:
            raise Missing("; ".join(failures), missing)
        return [report for report in reports if report.replica in members]

    async def _heard(self, timeout_s: float, members: Collection[str], **phase: Any) -> list[pb.WeightReport]:
        """The reports on a phase; Missing as soon as members stand still."""
        carrying = asyncio.ensure_future(self._rollout.update_weights(timeout_s, members=members, **phase))
        watching = asyncio.ensure_future(self._silent(members))
        try:
            await asyncio.wait({carrying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if carrying.done():
                return carrying.result()
            silent = watching.result()
            raise Missing(f"{', '.join(sorted(silent))}: stands still during {next(iter(phase))}", silent)
        finally:
            for task in (carrying, watching):
                task.cancel()
            await asyncio.gather(carrying, watching, return_exceptions=True)

    async def _silent(self, members: Collection[str]) -> frozenset[str]:
        """Asks the members until some have stopped to answer; these. A replica that is busy with a phase answers
        without its engine, which may take as long as the phase has."""
        missed: dict[str, int] = {}
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            try:
                reports = await self._rollout.update_weights(ANSWER_S, members=members, discover=pb.Discover())
            except ServiceError:
                missed = {}  # the proxy or Serve is silent, which says nothing about members
                continue
            heard = {report.replica for report in reports}
            missed = {name: missed.get(name, 0) + 1 for name in members if name not in heard}
            if silent := [name for name, times in missed.items() if times >= MISSED]:
                return frozenset(silent)

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
        """The members' scores of the probe's sequences; empty if the call fails or a member stands still. Other
        replicas hold other weights, by which one that took the push would be disproved."""
        try:
            reports = await self._heard(self._config.timeout_s, members, probe=probe)
            return [report for report in reports if report.replica in members]
        except ServiceError as error:
            log.warning("probe: %s", error)
            return []
