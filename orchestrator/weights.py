"""The weight push: every rollout replica to the learner's weights, or an error that says which one and why."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator.config import WeightsConfig
from protos import rollout_pb2 as pb
from services.common.errors import ServiceError, Unavailable
from services.common.weight_transfer.registry import Admission
from services.rollout.client import RolloutClient

log = logging.getLogger("quartet")

Left = TypeVar("Left")
Right = TypeVar("Right")

GRACE_S = 1.0
"""When one side of a collective fails, the other gets this long to say why."""


class WeightSource(Protocol):
    """The learner's part: it meets the replicas and sends."""

    async def rendezvous(self, backend: str) -> Sequence[int]:
        """Ports at which the members of the next group meet, one for each sender."""

    async def join(self, epoch: int, world_size: int) -> bytes:
        """Forms the group; the packed manifest."""

    async def gather(self, push: int) -> None:
        """Takes the current weights as those of this push."""

    async def send(self, push: int) -> str:
        """Sends the weights of this push; the checksum."""

    async def admit(self, epoch: int, world_size: int) -> None:
        """Sends what was sent last to a group of newcomers, also while the learner trains."""


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
    """Pushes versions, one at a time, and brings newcomers to the last one in between.

    A push is prepare, transfer, commit, each carried out by all replicas at once and each with a deadline. The
    group is formed again only when the replicas are not those of the last push. A push that fails is rolled back
    everywhere and tried again with those that answer the roll-back: whoever is dead or silent is out.
    """

    def __init__(self, rollout: RolloutClient, source: WeightSource, backend: str, config: WeightsConfig) -> None:
        self._rollout = rollout
        self._source = source
        self._backend = backend
        self._config = config
        self._turn = asyncio.Lock()
        self._last_epoch = 0
        self._epoch = 0
        self._members: dict[str, int] = {}
        self._rendezvous: list[pb.Rendezvous] = []
        self._manifest = b""
        self._pushed: PushReport | None = None
        self._push = 0
        """Counts the pushes, for the source to tell them apart."""
        self._ahead = False
        """The source holds weights that are not pushed yet."""

    async def push(self, version: int) -> PushReport:
        """Brings every replica to `version`.

        Raises:
            PushFailed: not after all attempts; the message names each replica's reason.
        """
        start = time.monotonic()
        async with self._turn:
            if not self._rendezvous:
                await self._open()
            there = await self._discover()
            self._ahead, self._push = True, self._push + 1
            gathering = asyncio.ensure_future(self._source.gather(self._push))
            try:
                if self._backend != "gloo":  # which sends each bucket as soon as it is gathered
                    await gathering
                checksum, attempt = await self._attempts(version, there, gathering)
            finally:
                # Whatever became of the push: all ranks take part in gathering, and none is left waiting.
                await asyncio.wait([gathering])
            self._pushed = PushReport(version, tuple(self._members), time.monotonic() - start, attempt, checksum)
            self._ahead = False
            return self._pushed

    async def _attempts(
        self, version: int, there: list[pb.WeightReport], gathering: asyncio.Future[None]
    ) -> tuple[str, int]:
        """The checksum, and which attempt it was that succeeded."""
        for attempt in range(1, self._config.attempts + 1):
            try:
                return await self._attempt(version, there or await self._discover()), attempt
            except ServiceError as error:
                failure = error
                log.warning("push of version %d, attempt %d: %s", version, attempt, error)
                there = await self._abort()
            if gathering.done():
                gathering.result()  # its failure is the reason for this one, and will not mend itself
        raise PushFailed(f"version {version} after {self._config.attempts} attempts: {failure}")

    async def _attempt(self, version: int, there: list[pb.WeightReport]) -> str:
        await self._meet(there)
        prepare = self._prepare(self._epoch, self._members)
        if not self._manifest:
            # The group forms only when both sides enter it at the same time.
            _, self._manifest = await _both(
                self._phase(self._prepare_s, prepare=prepare), self._source.join(self._epoch, prepare.world_size)
            )
        else:
            await self._phase(self._prepare_s, prepare=prepare)
        transfer = pb.Transfer(epoch=self._epoch, manifest=self._manifest)
        reports, sent = await _both(
            self._phase(self._config.timeout_s, transfer=transfer), self._source.send(self._push)
        )
        wrong = [report.replica for report in reports if report.checksum != sent]
        if wrong:
            raise Unavailable(f"replicas {wrong} received other bytes than were sent")
        await self._phase(self._config.commit_s, commit=pb.Commit(epoch=self._epoch, policy_version=version))
        return sent

    async def _discover(self) -> list[pb.WeightReport]:
        """Who is there? Waits for the first replica when there is none: Serve may be about to replace it."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._config.patience_s
        while True:
            try:
                reports = await self._rollout.update_weights(self._config.control_s, discover=pb.Discover())
                failure: ServiceError = Unavailable("no rollout replica answers")
            except ServiceError as error:
                reports, failure = [], error
            # One that could not roll back says so; Serve replaces it.
            if able := [report for report in reports if report.ok]:
                return able
            if clock() >= end:
                raise failure
            # Whoever comes now may have to be let in first.
            self._turn.release()
            try:
                await asyncio.sleep(0.5)
            finally:
                await self._turn.acquire()

    async def _meet(self, there: list[pb.WeightReport]) -> None:
        """A membership that is new, or not together, starts a new epoch."""
        members = {report.replica: report.workers for report in sorted(there, key=lambda r: r.replica)}
        together = all(report.epoch == self._epoch for report in there)
        if members != self._members or not together or not self._epoch:
            # Above every epoch that anyone is in: replicas may still be in one of an earlier run.
            self._epoch = self._new_epoch(*(report.epoch for report in there))
            self._members = members
            self._manifest = b""
            await self._open()

    def _new_epoch(self, *others: int) -> int:
        self._last_epoch = 1 + max(self._last_epoch, *others, 0)
        return self._last_epoch

    async def _open(self) -> None:
        ports = await self._source.rendezvous(self._backend)
        self._rendezvous = [pb.Rendezvous(address=self._config.host, port=port) for port in ports]

    def _prepare(self, epoch: int, members: Mapping[str, int]) -> pb.Prepare:
        return pb.Prepare(
            epoch=epoch,
            senders=self._rendezvous,
            world_size=1 + sum(members.values()),
            ranks=_ranks(members),
            in_flight=self._config.in_flight,
            bucket_bytes=self._config.bucket_mib << 20,
            stall_s=self._config.stall_s,
            streaming=self._config.streaming,
        )

    @property
    def _prepare_s(self) -> float:
        """Waiting for requests to finish may take as long as a transfer; forming a group may not."""
        config = self._config
        return config.timeout_s if config.in_flight == "wait" else config.stall_s + config.control_s

    async def _phase(self, timeout_s: float, **phase: Any) -> list[pb.WeightReport]:
        """One phase on all members; Unavailable unless each took part and succeeded."""
        reports = await self._rollout.update_weights(timeout_s, members=self._members, **phase)
        # Whoever came since is not in this epoch and says so; only members count.
        failures = [f"{r.replica}: {r.error}" for r in reports if not r.ok and r.replica in self._members]
        missing = set(self._members) - {report.replica for report in reports}
        failures += [f"{replica}: did not answer {next(iter(phase))}" for replica in sorted(missing)]
        if failures:
            raise Unavailable("; ".join(failures))
        return [report for report in reports if report.replica in self._members]

    async def _abort(self) -> list[pb.WeightReport]:
        """Rolls everyone back; those that did are the next epoch's members."""
        self._members = {}
        try:
            reports = await self._rollout.update_weights(self._config.control_s, abort=pb.Abort(epoch=self._epoch))
        except ServiceError as error:
            # Replicas also roll back by themselves when a phase fails; whoever is gone needs no abort.
            log.warning("roll-back: %s", error)
            return []
        return [report for report in reports if report.ok]

    async def admit(self, applicants: Mapping[str, int], deliver: "Delivery") -> None:
        """Brings newcomers, by name with their workers, to the version that was last pushed.

        `deliver` hands each its Admission, or None before the first push and while one waits for a first replica:
        then they begin as they are, and the push that comes takes them along.

        Raises:
            ServiceError: the learner could not send. The newcomers notice, and apply again.
        """
        async with self._turn:
            if self._pushed is None or self._ahead:
                await deliver(dict.fromkeys(applicants))
                return
            epoch = self._new_epoch()
            await self._open()
            prepare = self._prepare(epoch, applicants)
            transfer = pb.Transfer(epoch=epoch, manifest=self._manifest)
            commit = pb.Commit(epoch=epoch, policy_version=self._pushed.policy_version)
            admission = Admission(
                prepare.SerializeToString(),
                transfer.SerializeToString(),
                commit.SerializeToString(),
                self._pushed.checksum,
                self._config.timeout_s,
            )
            await deliver(dict.fromkeys(applicants, admission))
            await self._source.admit(epoch, prepare.world_size)


class Delivery(Protocol):
    """How admissions reach those who applied."""

    async def __call__(self, admissions: dict[str, Admission | None]) -> None: ...


async def _both(replicas: Awaitable[Left], learner: Awaitable[Right]) -> tuple[Left, Right]:
    """Both sides of a collective, neither left behind. When both fail, the replicas' reason is the telling one."""
    left, right = asyncio.ensure_future(replicas), asyncio.ensure_future(learner)
    both: list[asyncio.Future[Any]] = [left, right]
    try:
        _, pending = await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=GRACE_S)
    finally:
        for side in both:
            side.cancel()
        await asyncio.gather(*both, return_exceptions=True)
    if not left.cancelled():
        left.result()
    right.result()
    return left.result(), right.result()


def _ranks(members: Mapping[str, int]) -> dict[str, int]:
    """The first rank of each replica: the sender is 0, every worker one more."""
    ranks, rank = {}, 1
    for replica, workers in members.items():
        ranks[replica] = rank
        rank += workers
    return ranks
