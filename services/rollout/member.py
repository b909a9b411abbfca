"""A replica's part in a weight push: one phase at a time, each within its deadline."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from protos import common_pb2
from protos import rollout_pb2 as pb
from quartet.serving.runs.lease import Fence
from quartet.serving.runs.timeline import Moment
from quartet.weight_transfer.manifest import Manifest
from quartet.wire.codec import pack_floats, unpack_sequences
from quartet.wire.errors import FailedPrecondition, InvalidArgument, LeaseLost, ServiceError
from quartet.wire.run_id import run_name
from services.rollout.interface import Engine, joining_info

log = logging.getLogger("quartet")

Result = TypeVar("Result")

LEARNER_SILENCE = 2.0
"""Multiple of the last phase's deadline for which an open push waits for a further phase."""
LEAVE_S = 30.0
"""Longest time for the engine to leave the group of a run that has ended, in seconds."""
LONGEST_REST_S = 24 * 3600.0
"""Longest rest for which a run may ask."""
LARGEST_BUCKET = 8 << 30
"""Largest bucket in bytes; limited because some backends allocate a bucket before any data comes."""


class WeightMember:
    """Carries out the phases of a push on one engine and reports the result of each.

    For example prepare(version 8) joins the group and pauses, transfer receives the weights, commit(8) puts them into
    service. If transfer fails, its report says so, abort resumes version 7, and this replica is ready for a new
    prepare. A prepare also closes what an earlier push has left open.

    A phase that comes twice in a row is carried out once: Serve repeats a call whose answer it lost.
    """

    def __init__(self, engine: Engine, replica: str) -> None:
        self._engine = engine
        self._replica = replica
        self._membership = 0
        self._open = False
        self._resting_s = 0.0  # longest that generation may rest for the learners; 0 if it does not rest
        self._turn = asyncio.Lock()
        self._patience: asyncio.Task[None] | None = None
        self._phases: set[asyncio.Task[Any]] = set()
        """The phases that were begun and have not ended."""
        self._openings = 0
        """Number of prepares that were begun."""
        self._last: tuple[tuple[int, str, bytes], str] | None = None
        """The last phase that succeeded and its checksum; None if what it did has been rolled back."""
        self._stall_s = 0.0
        """Longest wait of the engine for one bucket of the push that is open."""
        self._stuck = False
        """True while a push is being rolled back."""
        self._fence = Fence()
        self._timeline = 0
        self._settled = True
        """True if no push under an earlier lease is open here, and its group is left."""
        self._lapsing: asyncio.Task[None] | None = None
        """Waits for the end of the lease."""
        self.failure = ""
        """Reason for which this replica is unhealthy; empty while it is healthy."""
        self.proved: pb.Proof | None = None
        """The last proof of the pushes of the run that holds the replica, as far as it has been told."""

    @property
    def busy(self) -> bool:
        """True while a phase is carried out; the engine answers nothing else meanwhile."""
        return self._turn.locked()

    @property
    def at(self) -> Moment:
        """The version that the engine serves, and the timeline of the push that brought it."""
        return Moment(self._timeline, self._engine.version)

    @property
    def run(self) -> str:
        """Name of the run that holds the replica, or held it last; empty if none ever did."""
        return run_name(self._fence.held().lease.run_id)

    @property
    def held(self) -> bool:
        """True while a run that is alive holds the replica."""
        return self._fence.held().left_s > 0

    def check(self, lease: common_pb2.Lease) -> None:
        """Returns if this is the lease that holds the replica. See Fence.check."""
        self._fence.check(lease)

    async def carry_out(self, phase: pb.WeightPhase) -> pb.WeightReport:
        """Carries out one phase. Never raises: a failed phase is rolled back and its report holds the error."""
        name = phase.WhichOneof("phase")
        if name == "discover":
            return await self._discover(phase.discover, phase.timeout_s)
        if name == "claim":
            return await self._claim(phase)
        try:
            self._fence.check(phase.lease)
        except ServiceError as error:
            # Not rolled back: an open push belongs to another run.
            return self._report(f"{name}: {error}", fenced=isinstance(error, LeaseLost))
        if phase.HasField("proved"):
            self.proved = phase.proved
        if name == "probe":
            return await self._probe(phase.probe, phase.timeout_s)
        if self._patience is not None:
            self._patience.cancel()
        # The phase goes on, and is rolled back if it fails, even if its caller is gone: the engine is still busy.
        return await asyncio.shield(self._begun(self._in_turn(name, phase)))

    def _begun(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """The work as a task, which goes on if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._phases.add(task)
        task.add_done_callback(self._phases.discard)
        return task

    async def _in_turn(self, name: str, phase: pb.WeightPhase) -> pb.WeightReport:
        steps: dict[str, Callable[[Any], Awaitable[str]]] = {
            "prepare": self._prepare,
            "transfer": self._transfer,
            "commit": self._commit,
            "abort": self._abort,
            "rest": self._rest,
        }
        try:
            # One at a time: an abort may arrive while a transfer, abandoned by its caller, is still failing here.
            async with asyncio.timeout(phase.timeout_s), self._turn:
                self._fence.check(phase.lease)  # again: another run may have claimed the replica meanwhile
                message = getattr(phase, name).SerializeToString(deterministic=True)
                asked = (phase.lease.number, name, message)
                if self._last is not None and self._last[0] == asked:
                    return self._report(checksum=self._last[1])
                self._last = None
                checksum = await steps[name](getattr(phase, name))
                self._last = asked, checksum
                if name == "commit":
                    self._timeline = phase.lease.number
            return self._report(checksum=checksum)
        except LeaseLost as error:
            return self._report(f"{name}: {error}", fenced=True)
        except Exception as error:
            log.warning("push: %s failed on %s: %s", name, self._replica, error)
            await self._roll_back(phase.timeout_s)
            return self._report(f"{name}: {type(error).__name__}: {error}")
        finally:
            if self._open or self._resting_s:
                if self._patience is not None:  # of another phase that waited for its turn beside this one
                    self._patience.cancel()
                seconds = self._resting_s if name == "rest" else LEARNER_SILENCE * phase.timeout_s
                self._patience = asyncio.create_task(self._expire(seconds))

    async def _discover(self, message: pb.Discover, timeout_s: float) -> pb.WeightReport:
        if self._stuck:
            return self._report(self.failure or "a push that failed is still being rolled back")
        try:
            async with asyncio.timeout(timeout_s):
                if not self.busy:  # a phase has its own deadline
                    await self._engine.check_health()
        except Exception as error:
            return self._report(f"its engine does not answer: {type(error).__name__}: {error}")
        return self._report(misfit=self._misfit(message.manifest) if message.manifest else "")

    def _misfit(self, manifest: bytes) -> str:
        try:
            self._checked(manifest)
        except (ServiceError, ValueError) as error:
            return str(error)[:1000]
        return ""

    def _checked(self, packed: bytes) -> Manifest:
        """The manifest, after a check that the engine can take such a push."""
        if len(packed) > self._engine.longest_manifest:
            raise InvalidArgument(f"manifest: {len(packed)} bytes; no push to this replica's model needs as many")
        manifest = Manifest.unpack(packed)
        self._engine.check(manifest)
        return manifest

    async def _claim(self, phase: pb.WeightPhase) -> pb.WeightReport:
        """Puts the lease in force. When it answers, phases under others have ended and later ones are refused."""
        try:
            if self._fence.claim(phase.lease, phase.claim):
                self._settled, self.proved = False, None
            if phase.HasField("proved"):
                self.proved = phase.proved
            if not self._settled:
                async with asyncio.timeout(phase.timeout_s), self._turn:
                    if self._open or self._resting_s:
                        log.warning("push: %s is claimed by run %s meanwhile", self._replica, phase.lease.run_id)
                        await self._abort(pb.Abort())
                    elif self._membership:
                        await self._leave()
                self._settled = True
            if self._lapsing is not None:
                self._lapsing.cancel()
            self._lapsing = asyncio.create_task(self._lapse(phase.claim.ttl_s))
            return self._report()
        except Exception as error:
            text = f"claim: {error}" if isinstance(error, ServiceError) else f"claim: {type(error).__name__}: {error}"
            return self._report(text, fenced=isinstance(error, LeaseLost))

    async def _probe(self, message: pb.Probe, timeout_s: float) -> pb.WeightReport:
        """Scores the probe's sequences; the engine goes on sampling meanwhile."""
        try:
            async with asyncio.timeout(timeout_s):
                vocabulary, field = self._engine.vocab_size, "probe.sequences"
                scored = await self._engine.score(unpack_sequences(message.sequences, field, vocab_size=vocabulary))
                return self._report(logprobs=pack_floats(scored), stale=await self._engine.stale())
        except Exception as error:
            log.warning("push: probe failed on %s: %s", self._replica, error)
            return self._report(f"probe: {type(error).__name__}: {error}")

    def _report(self, error: str = "", **fields: Any) -> pb.WeightReport:
        """This replica's report on a phase, which has succeeded unless there is an error."""
        return pb.WeightReport(
            replica=self._replica,
            ok=not error,
            error=error[:1000],
            policy_version=self._engine.version,
            timeline=self._timeline,
            membership=self._membership,
            workers=self._engine.workers,
            held=self._fence.held(),
            place=pb.Place(machine=self._engine.place.machine, gpus=self._engine.place.gpus),
            **fields,
        )

    async def _prepare(self, message: pb.Prepare) -> str:
        if self._replica not in message.ranks:
            raise FailedPrecondition(f"{self._replica} is not in membership {message.membership}")
        if message.bucket_bytes > LARGEST_BUCKET:
            raise InvalidArgument(f"bucket_bytes: {message.bucket_bytes}; must be at most {LARGEST_BUCKET}")
        # Checked before the group forms, generation pauses or data is sent.
        self._checked(message.manifest)
        self._openings += 1
        if self._open:
            log.warning("push: %s closes membership %d, which was left open", self._replica, self._membership)
            await self._abort(pb.Abort())
        if self._membership != message.membership:
            if self._engine.backend not in ("auto", message.backend):
                raise FailedPrecondition(
                    f"weight_backend: {self._engine.backend} here, but weights are pushed by {message.backend}"
                )
            await self._engine.join(joining_info(message, self._replica))
            self._membership = message.membership
        self._open, self._stall_s = True, message.stall_s
        await self._engine.pause(message.in_flight)
        return ""

    async def _transfer(self, message: pb.Transfer) -> str:
        self._expect(message.membership)
        return await self._engine.receive(self._checked(message.manifest))

    async def _commit(self, message: pb.Commit) -> str:
        self._expect(message.membership)
        await self._engine.commit(message.policy_version)
        self._open, self._resting_s, self.failure = False, 0.0, ""
        return self._engine.checksum

    async def _rest(self, message: pb.Rest) -> str:
        if not 0 < message.at_most_s <= LONGEST_REST_S:
            raise InvalidArgument(
                f"rest.at_most_s: {message.at_most_s:g}; must be more than 0 and at most {LONGEST_REST_S:g}"
            )
        self._resting_s = message.at_most_s
        await self._engine.rest()
        return ""

    async def _abort(self, message: pb.Abort) -> str:
        if self._open or self._resting_s:
            whole = await self._engine.abort()
        else:
            whole = True
            # Members of the next attempt are those whose engines answer this.
            await (self._leave() if self._membership else self._engine.check_health())
        self._open, self._resting_s, self._membership, self._stuck = False, 0.0, 0, False
        self._last = None
        if whole and self._engine.version >= 0:
            self.failure = ""
        else:
            self.failure = "a push that loads weights into place failed; this replica waits for a complete one"
        return ""

    async def _leave(self) -> None:
        """Leaves the group, and with it the learner's memory, which a GPU keeps for as long as it is mapped here."""
        self._membership, self._last = 0, None
        await self._engine.leave()

    async def _lapse(self, seconds: float) -> None:
        """Leaves the group of a run whose lease is over, `seconds` after its last claim. A run that was only slow
        forms a group again with its next push."""
        await asyncio.sleep(seconds)
        try:
            async with asyncio.timeout(LEAVE_S), self._turn:
                # A push that is open is rolled back by _expire, which leaves the group too.
                if self._membership and not (self._open or self._resting_s):
                    await self._leave()
        except Exception as error:
            log.warning("push: %s did not leave the group of a run that is over: %s", self._replica, error)

    def _expect(self, membership: int) -> None:
        if not self._open or membership != self._membership:
            raise FailedPrecondition(
                f"membership {membership} is not open here; this replica is in {self._membership}"
            )

    async def _roll_back(self, timeout_s: float) -> None:
        """Returns to generating with the old weights, so that a failed push never leaves a replica paused.

        An engine that waits for a bucket answers nothing for up to the push's `stall_s`. This replica takes no part
        in pushes meanwhile, and counts as ill only if the engine takes longer. If a further push is begun before it
        is this roll-back's turn, that one has closed what was open.
        """
        self._stuck, openings = True, self._openings
        try:
            async with asyncio.timeout(self._stall_s + timeout_s), self._turn:
                if openings == self._openings:
                    await self._abort(pb.Abort())
                self._stuck = False
        except Exception as error:
            log.error("push: roll-back failed on %s: %s", self._replica, error)
            self.failure = f"paused by a push that could not be rolled back: {type(error).__name__}: {error}"

    async def _expire(self, seconds: float) -> None:
        """Rolls back a push whose orchestrator sends no further phase, since nothing else would resume generation."""
        await asyncio.sleep(seconds)
        if self._phases:
            return  # one that takes long is not silence; at its end the wait begins again
        log.warning("push: no further phase reached %s within %g s; rolling back", self._replica, seconds)
        # A phase that comes now ends this wait and not the roll-back, for which it waits.
        await asyncio.shield(self._begun(self._roll_back(seconds)))
