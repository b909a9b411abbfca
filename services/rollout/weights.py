"""A replica's part in a weight push: one phase at a time, each within its deadline."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from protos import rollout_pb2 as pb
from services.common.errors import FailedPrecondition
from services.common.weight_transfer.manifest import Manifest
from services.rollout.interface import Engine

log = logging.getLogger("quartet")

LEASE = 2.0
"""How long an open push stays open without a further phase, in deadlines of its last one."""


class WeightMember:
    """Carries out the phases of a push on one engine and reports how each went."""

    def __init__(self, engine: Engine, replica: str, host: str) -> None:
        self._engine = engine
        self._replica = replica
        self._host = host
        self._epoch = 0
        self._open = False
        self._turn = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None
        self._stuck = False
        self.failure = ""
        """Why this replica cannot go on, for its health check; empty while it can."""

    @property
    def busy(self) -> bool:
        """A phase is being carried out: the engine answers nothing else meanwhile."""
        return self._turn.locked()

    async def carry_out(self, phase: pb.WeightPhase) -> pb.WeightReport:
        """Never raises: a phase that fails is rolled back here and its report says what went wrong."""
        name = phase.WhichOneof("phase")
        if name == "discover":
            return self._report(ok=not self._stuck, error=self.failure if self._stuck else "")
        steps: dict[str, Callable[[Any], Awaitable[str]]] = {
            "prepare": self._prepare,
            "transfer": self._transfer,
            "commit": self._commit,
            "abort": self._abort,
        }
        if self._lease is not None:
            self._lease.cancel()
        try:
            # In turn: an abort may overtake a transfer that its caller has given up but that is still failing here.
            async with asyncio.timeout(phase.timeout_s), self._turn:
                checksum = await steps[name](getattr(phase, name))
            return self._report(ok=True, checksum=checksum)
        except Exception as error:
            log.warning("push: %s failed on %s: %s", name, self._replica, error)
            await self._roll_back(phase.timeout_s)
            return self._report(ok=False, error=f"{name}: {type(error).__name__}: {error}"[:1000])
        finally:
            if self._open:
                self._lease = asyncio.create_task(self._expire(LEASE * phase.timeout_s))

    def _report(self, **fields: Any) -> pb.WeightReport:
        return pb.WeightReport(
            replica=self._replica,
            policy_version=self._engine.version,
            epoch=self._epoch,
            workers=self._engine.workers,
            **fields,
        )

    async def _prepare(self, message: pb.Prepare) -> str:
        if self._replica not in message.ranks:
            raise FailedPrecondition(f"{self._replica} is no member of epoch {message.epoch}")
        if self._epoch != message.epoch:
            await self._engine.join(self._init_info(message))
            self._epoch = message.epoch
        self._open = True
        await self._engine.pause(message.in_flight)
        return ""

    def _init_info(self, message: pb.Prepare) -> dict[str, Any]:
        if self._engine.backend == "ipc":
            return {"segments": [sender.port for sender in message.senders]}
        place = {"rank_offset": message.ranks[self._replica], "world_size": message.world_size}
        if self._engine.backend == "gloo":
            return place | {
                "senders": [[sender.address, sender.port] for sender in message.senders],
                "epoch": message.epoch,
                "host": self._host,
                "stall_s": message.stall_s,
                "streaming": message.streaming,
            }
        [sender] = message.senders
        return place | {
            "master_address": sender.address,
            "master_port": sender.port,
            "packed": True,
            "packed_buffer_size_bytes": message.bucket_bytes,
        }

    async def _transfer(self, message: pb.Transfer) -> str:
        self._expect(message.epoch)
        return await self._engine.receive(Manifest.unpack(message.manifest))

    async def _commit(self, message: pb.Commit) -> str:
        self._expect(message.epoch)
        await self._engine.commit(message.policy_version)
        self._open, self.failure = False, ""
        return self._engine.checksum

    async def _abort(self, message: pb.Abort) -> str:
        whole = await self._engine.abort() if self._open else True
        self._open, self._epoch, self._stuck = False, 0, False
        if whole and self._engine.version >= 0:
            self.failure = ""
        else:
            self.failure = "a push that loads weights into place broke off; this replica waits for a whole one"
        return ""

    def _expect(self, epoch: int) -> None:
        if not self._open or epoch != self._epoch:
            raise FailedPrecondition(f"epoch {epoch} is not open here; this replica is in {self._epoch}")

    async def _roll_back(self, timeout_s: float) -> None:
        """Back to generating with the old weights, so that a failed push never leaves a replica paused."""
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                await self._abort(pb.Abort())
        except Exception as error:
            log.error("push: roll-back failed on %s: %s", self._replica, error)
            self._stuck = True
            self.failure = f"paused by a push that could not be rolled back: {type(error).__name__}: {error}"

    async def _expire(self, seconds: float) -> None:
        """A push whose orchestrator fell silent half-way is over: nobody else would resume generation."""
        await asyncio.sleep(seconds)
        log.warning("push: no further phase reached %s within %g s; rolling back", self._replica, seconds)
        await self._roll_back(seconds)
