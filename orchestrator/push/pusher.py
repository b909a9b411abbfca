"""The weight push: brings every rollout replica to the learner's weights, or fails with the reason of each
replica."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.config.weights import WeightsConfig
from orchestrator.push.group import PushGroup
from orchestrator.push.prover import Prover, PushDisproved
from orchestrator.push.replicas import Misfit, Missing, Replicas
from orchestrator.push.source import WeightSource, both
from orchestrator.push.transport import SHARED_BACKENDS
from orchestrator.tracing.spans import UNTRACED, Spans
from protos import rollout_pb2 as pb
from quartet.config.base import ConfigError
from quartet.weight_transfer.registry import Applicant, Ticket
from quartet.wire.backoff import Deadline
from quartet.wire.errors import LeaseLost, ServiceError, Unavailable
from services.rollout.client import RolloutClient

log = logging.getLogger("quartet")

LOOK_S = 0.5
"""Seconds between two looks for a first replica, or for one that joined."""
NAMED_S = 10.0
"""Seconds within which Serve names a replica that joined, unless it has died."""
Delivery = Callable[[dict[str, Ticket | None]], Awaitable[None]]
"""Hands tickets to the applicants."""
Watch = Callable[[Mapping[str, Applicant]], Awaitable[str]]
"""Waits until one of these applicants has died; its name."""


class PushFailed(ServiceError):
    """A push did not reach every replica. A replica serves its old weights, or none if it failed while it loaded the
    new ones."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Result of a push."""

    policy_version: int
    replicas: tuple[str, ...]
    seconds: float
    attempts: int
    checksum: str
    difference: float | None = None
    """Largest mean difference of a replica's log-probs from the learner's in the proof, as a part of their spread.
    None if the push was not proved."""


@dataclass(frozen=True, slots=True)
class StagedPush:
    """Weights that are being copied, or were copied, out of the learner."""

    policy_version: int
    push: int
    """Number of the push."""
    began: float
    answers: list[pb.WeightReport]
    """Reports of the replicas that answered."""
    gathering: asyncio.Future[None]
    """Done when the learner's weights are copied."""
    held: bool
    """True if the learner keeps these weights until they are delivered."""


class WeightPusher:
    """Pushes versions, one at a time, and brings newcomers to the last one in between.

    A push is prepare, transfer, commit, each carried out by all replicas at once and each with a deadline. The
    group is formed again only when the replicas are not those of the last push. A push that fails is rolled back
    on all replicas and retried with those that acknowledge the roll-back; the rest leave the group.

    In lock-step `push` does it all. To train meanwhile, stage first and deliver after:

        staged = await pusher.stage(5)      # the weights are copied
        training = policy.train(...)        # moves the learner's weights, not the copy
        report = await pusher.deliver(staged)
    """

    def __init__(
        self,
        rollout: RolloutClient,
        source: WeightSource,
        backend: str,
        config: WeightsConfig,
        prover: Prover | None = None,
        spans: Spans = UNTRACED,
    ) -> None:
        """`backend` is weights.backend. Without a `prover` only the bytes that arrived are compared. `spans` records
        the phases of each push."""
        self._replicas = Replicas(rollout, config)
        self._source = source
        self._group = PushGroup(source, backend, config)
        self._config = config
        self._turn = asyncio.Condition()
        self._pushed: PushReport | None = None
        self._count = 0
        """Number of pushes, by which the source tells them apart."""
        self._ahead = False
        """True if the source holds weights that are not pushed yet."""
        self._pausing = False
        """True while a push waits for a first replica."""
        self._joined: dict[str, int | None] = {}
        """Newcomers that no push has found yet, with the version that they were brought to."""
        self._prover = prover
        self._track = spans.on("push")

    async def __aenter__(self) -> "WeightPusher":
        return self

    async def __aexit__(self, *error: object) -> None:
        """Lets the replicas leave the learner's group before the learner ends: until then a GPU keeps its memory that
        they read, and it may not be freed."""
        if self._group.membership:
            await self._replicas.abort(self._group.membership, list(self._group.members))

    async def push(self, version: int) -> PushReport:
        """Brings every replica to `version`; the learner must not train meanwhile. Raises like `stage` and
        `deliver`."""
        async with self._turn:
            return await self._deliver(await self._begin(version, held=True))

    async def stage(self, version: int) -> StagedPush:
        """Copies the learner's weights as `version`. From its return on the learner may train.

        Raises:
            Misfit: the weights do not fit the replicas' model.
            ConfigError: the configured backend does not reach every replica.
            ServiceError: no replica has come, or the learner failed.
        """
        async with self._turn:
            staged = await self._begin(version, held=False)
            if self._prover:
                self._prover.begin(staged.push, [report.replica for report in staged.answers])
                await self._prover.scored()
            await staged.gathering
            return staged

    async def deliver(self, staged: StagedPush) -> PushReport:
        """Brings every replica to the weights staged last; the learner may train meanwhile.

        Raises:
            LeaseLost: another run has taken the replicas over.
            PushFailed: all attempts failed; the message names each replica's reason.
            PushDisproved: a replica took the push but computes with other weights.
            ValueError: other weights were staged after these.
        """
        async with self._turn:
            if staged.push != self._count:
                raise ValueError(f"version {staged.policy_version} was staged before another; its copy is gone")
            return await self._deliver(replace(staged, answers=[]))  # other replicas may answer by now

    async def complete(self) -> None:
        """Pushes the last version again to newcomers that the last pushes passed over: Serve names a replica a moment
        after it has joined, and after a run's end no push follows. The learner must not have trained since. A warning
        tells of those that it does not reach.

        Raises:
            LeaseLost: another run has taken the replicas over.
            PushDisproved: a replica took the push but computes with other weights.
        """
        async with self._turn:
            deadline, reason = Deadline(NAMED_S), "Serve does not name them"
            try:
                while self._behind() and not deadline.passes_within(0):
                    if self._behind() & {report.replica for report in await self._discover()}:
                        assert self._pushed is not None
                        await self._deliver(await self._begin(self._pushed.policy_version, held=True))
                    else:
                        await asyncio.sleep(LOOK_S)
            except (LeaseLost, PushDisproved):
                raise
            except (ServiceError, ConfigError) as error:
                reason = str(error)
            if behind := self._behind():
                log.warning(
                    "rollout replicas that joined too late for the last push have other weights (%s): %s",
                    ", ".join(sorted(behind)),
                    reason,
                )

    def joined(self, names: Iterable[str]) -> None:
        """Notes newcomers that began with weights of their own."""
        self._joined |= dict.fromkeys(names)

    def _behind(self) -> set[str]:
        """Newcomers that were not brought to the version that was pushed last."""
        last = self._pushed and self._pushed.policy_version
        return {name for name, version in self._joined.items() if version != last}

    async def rest(self, at_most_s: float) -> None:
        """Pauses the replicas and makes them release their KV cache's memory until the next push, or `at_most_s`."""
        async with self._turn:
            await self._replicas.rest(at_most_s)

    async def _begin(self, version: int, *, held: bool) -> StagedPush:
        began = time.monotonic()
        with self._track("discover", version=version):
            await self._group.learn()
            answers = await self._discover()
            await self._group.settle(answers)  # before the weights are copied: the copy depends on the backend
        self._ahead, self._count = True, self._count + 1
        gather = self._source.gather(self._count)
        gathering = asyncio.ensure_future(self._track.timing("stage", gather, version=version))
        return StagedPush(version, self._count, began, answers, gathering, held)

    async def _deliver(self, staged: StagedPush) -> PushReport:
        try:
            if self._group.backend in SHARED_BACKENDS:  # the others send each bucket as soon as it is gathered
                await staged.gathering
            with self._track("deliver", version=staged.policy_version):
                checksum, attempt = await self._attempts(staged)
        finally:
            # Awaited even after a failure: all ranks take part in gathering, so none is left waiting.
            await asyncio.wait([staged.gathering])
        version, members = staged.policy_version, self._group.members
        difference = None
        if self._prover:
            with self._track("prove", version=version):
                difference = await self._prover.prove(staged.push, version, members, self._scores)
        if difference is not None:
            self._replicas.tell_proof(version, difference)
        seconds = time.monotonic() - staged.began
        self._pushed = PushReport(version, tuple(members), seconds, attempt, checksum, difference)
        self._joined = {name: at for name, at in self._joined.items() if name not in members}
        self._ahead = False
        self._turn.notify_all()
        return self._pushed

    async def _attempts(self, staged: StagedPush) -> tuple[str, int]:
        """Tries the push several times; returns the checksum and the number of the attempt that succeeded."""
        answers, version = staged.answers, staged.policy_version
        for attempt in range(1, self._config.attempts + 1):
            try:
                answers = self._group.reached(answers or await self._discover())
                return await self._attempt(staged, answers), attempt
            except ServiceError as error:
                if isinstance(error, LeaseLost | Misfit):
                    raise
                failure = error
                log.warning("push of version %d, attempt %d: %s", version, attempt, error)
                silent = error.silent if isinstance(error, Missing) else frozenset()
                answering = [name for name in self._group.members if name not in silent]
                self._group.members = {}
                answers = await self._give_up(self._group.membership, answering)
            if staged.gathering.done():
                staged.gathering.result()  # raises if the gathering failed, which a further attempt cannot mend
        raise PushFailed(f"version {version} after {self._config.attempts} attempts: {failure}")

    async def _give_up(self, membership: int, answering: Sequence[str]) -> list[pb.WeightReport]:
        """Frees members that wait for one another, and rolls all replicas back; the reports of those that did.
        `answering` are members that are not silent."""
        abandoning = asyncio.ensure_future(self._source.abandon(membership))
        answers = await self._replicas.abort(membership, answering)
        try:
            await abandoning
        except ServiceError as error:
            log.warning("the learner could not abandon membership %d: %s", membership, error)
        return answers

    async def _attempt(self, staged: StagedPush, answers: list[pb.WeightReport]) -> str:
        group, replicas = self._group, self._replicas
        if not answers:  # such as after the only replica was replaced on another machine
            raise Unavailable(f"{group.backend} reaches none of the rollout replicas that answer")
        group.meet(answers)
        members, prepare = group.members, group.prepare()
        if not group.formed:
            # The group forms only when both sides enter it at the same time.
            await both(replicas.prepare(members, prepare), self._source.join(group.membership, prepare.world_size))
            group.formed = True
        else:
            await replicas.prepare(members, prepare)
        reports, sent = await both(
            replicas.phase(members, self._config.timeout_s, transfer=group.transfer(group.membership)),
            self._source.send(staged.push),
        )
        wrong = [report.replica for report in reports if report.checksum != sent]
        if wrong:
            raise Unavailable(f"replicas {wrong} received other bytes than were sent")
        if self._prover and staged.held:
            self._prover.begin(staged.push, members)
        commit = pb.Commit(membership=group.membership, policy_version=staged.policy_version)
        await replicas.phase(members, self._config.commit_s, commit=commit)
        return sent

    async def _scores(self, probe: pb.Probe) -> list[pb.WeightReport]:
        return await self._replicas.score(self._group.members, probe)

    async def _discover(self) -> list[pb.WeightReport]:
        group = self._group
        return await self._replicas.discover(group.manifest, list(group.members), self._let_newcomers_in)

    async def _let_newcomers_in(self) -> None:
        """Pauses so that `add_newcomers` can let in a first replica."""
        self._pausing = True
        self._turn.notify_all()
        self._turn.release()
        try:
            await asyncio.sleep(LOOK_S)
        finally:
            await self._turn.acquire()
            self._pausing = False

    async def add_newcomers(self, applicants: Mapping[str, Applicant], deliver: Delivery, first_death: Watch) -> None:
        """Brings newcomers, given by name, to the version that was pushed last, or is staged now.

        `deliver` gives each its Ticket. It gives None before the first push, while a push waits for a first replica,
        and if the backend does not reach the newcomer: then it starts with its own weights and takes part in the next
        push. Weights that are staged go to the others first, since the copy of those before is gone. The group of the
        newcomers is given up at the `first_death` among them: it would wait for the dead one until a deadline, and
        the next push with it.

        Raises:
            ServiceError: a newcomer died, or the learner could not send. The others notice that and apply again.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._pausing or not self._ahead)
            if self._pushed is None or self._ahead:
                await deliver(dict.fromkeys(applicants))
                self.joined(applicants)
                return
            hindered = [name for name, applicant in applicants.items() if self._group.hindered(name, applicant.place)]
            if hindered:
                await deliver(dict.fromkeys(hindered))
                self.joined(hindered)
            joining = {name: applicant for name, applicant in applicants.items() if name not in hindered}
            if joining:
                prepare = self._group.newcomers({name: its.workers for name, its in joining.items()})
                await deliver(dict.fromkeys(joining, await self._ticket(prepare, self._pushed)))
                await self._send_to_newcomers(prepare, first_death(joining))
                self._joined |= dict.fromkeys(joining, self._pushed.policy_version)
                log.info("%s: joined with version %d", ", ".join(joining), self._pushed.policy_version)

    async def _ticket(self, prepare: pb.Prepare, pushed: PushReport) -> Ticket:
        """The phases of the last push for the newcomers of `prepare`, and the log-probs that they should compute
        afterwards."""
        proof = await self._prover.of_members(self._scores) if self._prover else None
        transfer = self._group.transfer(prepare.membership).SerializeToString()
        commit = pb.Commit(membership=prepare.membership, policy_version=pushed.policy_version).SerializeToString()
        return Ticket(prepare.SerializeToString(), transfer, commit, pushed.checksum, self._config.timeout_s, proof)

    async def _send_to_newcomers(self, prepare: pb.Prepare, death: Awaitable[str]) -> None:
        """Sends the weights of the last push to the group of `prepare`, or gives it up at a death."""
        sending = asyncio.ensure_future(self._source.add_newcomers(prepare.membership, prepare.world_size))
        dying = asyncio.ensure_future(death)
        try:
            await asyncio.wait({sending, dying}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return
            await self._source.abandon(prepare.membership)
            await asyncio.wait({sending})
            raise Unavailable(f"{dying.result()} died while it joined")
        finally:
            sending.cancel()
            dying.cancel()
            await asyncio.gather(sending, dying, return_exceptions=True)
