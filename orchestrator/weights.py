"""The weight push: every rollout replica to the learner's weights, or an error that says which one and why."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator.config import WeightsConfig
from protos import rollout_pb2 as pb
from services.common.errors import ServiceError, Unavailable
from services.rollout.client import RolloutClient

Left = TypeVar("Left")
Right = TypeVar("Right")


class WeightSource(Protocol):
    """The learner's part: it meets the replicas and sends."""

    async def rendezvous(self, backend: str) -> int:
        """Port at which the members of the next group meet."""

    async def join(self, epoch: int, world_size: int) -> bytes:
        """Forms the group; the packed manifest."""

    async def send(self) -> str:
        """Sends; the checksum."""


class PushFailed(ServiceError):
    """A push did not reach every replica. All of them serve the weights they had."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did."""

    policy_version: int
    replicas: tuple[str, ...]
    seconds: float
    attempts: int
    checksum: str


class WeightPusher:
    """Pushes versions, one at a time.

    A push is prepare, transfer, commit, each carried out by all replicas at once and each with a deadline. The
    group is formed again only when the replicas are not those of the last push. A push that fails is rolled back
    everywhere and tried again with whoever is there then.
    """

    def __init__(self, rollout: RolloutClient, source: WeightSource, backend: str, config: WeightsConfig) -> None:
        self._rollout = rollout
        self._source = source
        self._backend = backend
        self._config = config
        self._epoch = 0
        self._members: dict[str, int] = {}
        self._port = 0
        self._manifest = b""

    async def push(self, version: int) -> PushReport:
        """Brings every replica to `version`.

        Raises:
            PushFailed: not after all attempts; the message names each replica's reason.
        """
        start = time.monotonic()
        for attempt in range(1, self._config.attempts + 1):
            try:
                checksum = await self._attempt(version)
                seconds = time.monotonic() - start
                return PushReport(version, tuple(self._members), seconds, attempt, checksum)
            except ServiceError as error:
                failure = error
                await self._abort()
        raise PushFailed(f"version {version} after {self._config.attempts} attempts: {failure}")

    async def _attempt(self, version: int) -> str:
        await self._meet()
        prepare = pb.Prepare(
            epoch=self._epoch,
            master_address=self._config.host,
            master_port=self._port,
            world_size=1 + sum(self._members.values()),
            ranks=_ranks(self._members),
            in_flight=self._config.in_flight,
            bucket_bytes=self._config.bucket_mib << 20,
        )
        if not self._manifest:
            # The group forms only when both sides enter it at the same time.
            _, self._manifest = await _both(
                self._phase(prepare=prepare), self._source.join(self._epoch, prepare.world_size)
            )
        else:
            await self._phase(prepare=prepare)
        return await self._transfer_and_commit(version)

    async def _transfer_and_commit(self, version: int) -> str:
        transfer = pb.Transfer(epoch=self._epoch, manifest=self._manifest)
        reports, sent = await _both(self._phase(transfer=transfer), self._source.send())
        wrong = [report.replica for report in reports if report.checksum != sent]
        if wrong:
            raise Unavailable(f"replicas {wrong} received other bytes than were sent")
        await self._phase(commit=pb.Commit(epoch=self._epoch, policy_version=version))
        return sent

    async def _meet(self) -> None:
        """Asks who is there; a new membership starts a new epoch."""
        reports = await self._rollout.update_weights(self._config.timeout_s, discover=pb.Discover())
        if not reports:
            raise Unavailable("no rollout replica answers")
        members = {report.replica: report.workers for report in sorted(reports, key=lambda r: r.replica)}
        together = all(report.epoch == self._epoch for report in reports)
        if members != self._members or not together or not self._epoch:
            # Above every epoch that anyone is in: replicas may still be in one of an earlier run.
            self._epoch = 1 + max(self._epoch, *(report.epoch for report in reports))
            self._members = members
            self._manifest = b""
            self._port = await self._source.rendezvous(self._backend)

    async def _phase(self, **phase: Any) -> list[pb.WeightReport]:
        """One phase on all members; Unavailable unless each took part and succeeded."""
        reports = await self._rollout.update_weights(self._config.timeout_s, **phase)
        failures = [f"{report.replica}: {report.error}" for report in reports if not report.ok]
        missing = set(self._members) - {report.replica for report in reports}
        failures += [f"{replica}: did not answer {next(iter(phase))}" for replica in sorted(missing)]
        if failures:
            raise Unavailable("; ".join(failures))
        return reports

    async def _abort(self) -> None:
        self._members = {}
        try:
            await self._rollout.update_weights(self._config.timeout_s, abort=pb.Abort(epoch=self._epoch))
        except ServiceError:
            # Replicas also roll back by themselves when a phase fails; whoever is gone needs no abort.
            await asyncio.sleep(1)


async def _both(replicas: Awaitable[Left], learner: Awaitable[Right]) -> tuple[Left, Right]:
    """Both sides of a collective, neither left behind. When both fail, the replicas' reason is the telling one."""
    left, right = await asyncio.gather(replicas, learner, return_exceptions=True)
    if isinstance(left, BaseException):
        raise left
    if isinstance(right, BaseException):
        raise right
    return left, right


def _ranks(members: dict[str, int]) -> dict[str, int]:
    """The first rank of each replica: the sender is 0, every worker one more."""
    ranks, rank = {}, 1
    for replica, workers in members.items():
        ranks[replica] = rank
        rank += workers
    return ranks
