"""Client of the critic service."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos import common_pb2
from protos import critic_pb2 as pb
from protos.critic_pb2_grpc import CriticStub
from quartet.columns import Columns, Field, Schema
from quartet.wire.backoff import Backoff, Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, unpack_floats, unpack_longs, unpack_metrics
from quartet.wire.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, LeaseLost, OffTimeline
from quartet.wire.replies import finite_metrics, one_each, reading
from quartet.wire.splitting import in_parts, parts


class CriticReset(FailedPrecondition):
    """The critic is not in the expected state: it was replaced and has lost its training."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values of B trajectories with M sampled tokens."""

    values: Floats
    """V(prefix) before each sampled token, [M], trajectories end to end."""
    steps: list[int]
    """The last step that the critic had trained when it computed them, B of them."""


BATCH: Schema = {
    "values": Field("sampled"),
    "returns": Field("sampled"),
    "trained": Field("sampled", "bool", optional=True),
}
"""Columns of a batch that the critic trains on: its values from before the update, the returns that they should be,
and True at the tokens that are trained on; missing: all are."""


class CriticClient(ServiceClient[CriticStub]):
    """Asks the critic for values and trains it. Its only replica holds the weights, so calls never go to another.
    Every method may raise LeaseLost: another run holds the critic."""

    SERVICE = "critic"
    STUB = CriticStub

    lease = common_pb2.Lease()
    """The lease from the last `claim`; calls that change the critic carry it."""

    async def claim(
        self, lease: common_pb2.Lease, ttl_s: float, timeout_s: float, *, take_over: bool = False
    ) -> common_pb2.Held:
        """Puts the lease in force, or renews it, for `ttl_s` seconds; 0 releases the critic.

        Raises:
            LeaseLost: another run holds the critic and is alive, or has a later lease.
        """
        claim = common_pb2.Claim(ttl_s=ttl_s, take_over=take_over)
        request = pb.ClaimRequest(lease=lease, claim=claim)
        reply = await self._call(self._stub.Claim, request, timeout_s, "Claim")
        self.lease = lease
        held: common_pb2.Held = reply.held
        return held

    async def adopt(self, last_step: int, timeout_s: float) -> None:
        """Takes the critic as it is into the timeline of the run, which begins without a checkpoint.

        Raises:
            CriticReset: the critic trained another step than `last_step` last.
        """
        request = pb.AdoptRequest(lease=self.lease, last_step=last_step)
        with _expecting():
            await self._call(self._stub.Adopt, request, timeout_s, "Adopt")

    async def values(self, trajectories: Columns, *, min_step: int | None = None, timeout_s: float) -> Values:
        """The values of these trajectories.

        Args:
            trajectories: prompts and responses; further columns stay here.
            min_step: the least step that the critic must have trained since its run's last return to a checkpoint;
                waits until it has. None for any state.
            timeout_s: deadline in seconds.

        Raises:
            CriticReset: the critic's state is not of the run's timeline.
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`.
        """
        deadline, bare = Deadline(timeout_s), trajectories.select()

        async def ask(rows: range) -> tuple[Floats, list[int]]:
            part = bare.take(rows)
            request = pb.ValuesRequest(trajectories=part.pack(), min_step=min_step, lease=self.lease)
            reply = await self._reached(request, deadline, divisible=len(rows) > 1)
            with reading(f"{self.application}.Values"):
                steps = _steps(unpack_longs(reply.steps, "steps").tolist(), len(rows), min_step)
                values = unpack_floats(reply.values, "values")
                return one_each(values, part.size("sampled"), "values", "sampled tokens"), steps

        valued = await in_parts(trajectories.lengths.tolist(), ask)
        return Values(
            np.concatenate([values for values, _ in valued]), [step for _, steps in valued for step in steps]
        )

    async def _reached(self, request: pb.ValuesRequest, deadline: Deadline, *, divisible: bool) -> pb.ValuesResponse:
        """Asks for values, again and again while the critic is behind the step that they need."""
        backoff = Backoff(deadline)
        while True:
            try:
                reply: pb.ValuesResponse = await self._call(
                    self._stub.Values, request, deadline, "Values", divisible=divisible
                )
                return reply
            except LeaseLost:
                raise
            except OffTimeline as error:
                raise CriticReset(str(error)) from None
            except FailedPrecondition as error:
                if not request.HasField("min_step"):
                    raise
                await backoff.wait(DeadlineExceeded(f"{error}; given up after {deadline.timeout_s:g} s"))

    async def train(
        self,
        step: int,
        batch: Columns,
        *,
        epochs: int,
        minibatch_size: int,
        seed: int,
        last_step: int | None = None,
        timeout_s: float,
    ) -> dict[str, float]:
        """Trains on one PPO batch, whose columns of BATCH are sent, at most once per step id; returns the mean
        metrics of its optimizer steps. A large batch is sent in parts, ahead of the call that trains on it.

        Raises:
            CriticReset: a later step was trained already, or the step before was not `last_step` of the run's
                timeline, if given.
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`.
        """
        deadline, sizes = Deadline(timeout_s), batch.lengths.tolist()
        sent = batch.select(*(name for name in BATCH if name in batch or not BATCH[name].optional))

        async def stage(rows: range) -> None:
            part = pb.StageRequest(step=step, row=rows.start, lease=self.lease, batch=sent.take(rows).pack())
            with _expecting():
                await self._call(self._stub.Stage, part, deadline, "Stage", divisible=len(rows) > 1)

        staged = len(parts(sizes)) > 1
        if staged:
            await in_parts(sizes, stage)
        request = pb.TrainRequest(
            step=step,
            staged=len(batch) if staged else 0,
            batch=b"" if staged else sent.pack(),
            epochs=epochs,
            minibatch_size=minibatch_size,
            seed=seed,
            last_step=last_step,
            lease=self.lease,
        )
        with _expecting():
            reply = await self._call(self._stub.Train, request, deadline, "Train")
        with reading(f"{self.application}.Train"):
            return finite_metrics(unpack_metrics(reply.metrics))

    async def save(self, name: str, timeout_s: float) -> None:
        """Makes the critic write its model to the folder of this name under its root.

        Raises:
            InvalidArgument: the name is not valid, or the folder holds something that Quartet did not write.
        """
        request = pb.SaveRequest(name=name, lease=self.lease)
        await self._call(self._stub.Save, request, timeout_s, "Save")

    async def take_checkpoint(self, name: str, last_step: int, timeout_s: float, *, copies: bool = True) -> None:
        """Makes the critic copy its state after `last_step`; `write_checkpoint` writes the copy to the folder of this
        name under its root. Without `copies` the state is written at once.

        Raises:
            CriticReset: the critic trained another step last, or its state is not of the run's timeline.
        """
        request = self._checkpoint(name, last_step=last_step, without_copies=not copies)
        with _expecting():
            await self._call(self._stub.TakeCheckpoint, request, timeout_s, "TakeCheckpoint")

    async def write_checkpoint(self, name: str, timeout_s: float) -> None:
        """Writes the state that was taken for `name`; returns when it is on disk.

        Raises:
            CriticReset: no state was taken for the name, or it was lost with its replica.
        """
        with _expecting():
            await self._call(self._stub.WriteCheckpoint, self._checkpoint(name), timeout_s, "WriteCheckpoint")

    async def restore_checkpoint(self, name: str, timeout_s: float) -> int:
        """Makes the critic resume from the checkpoint; returns the last step that it holds.

        Raises:
            InvalidArgument: the checkpoint does not exist, or has another layout.
        """
        request = self._checkpoint(name)
        reply = await self._call(self._stub.RestoreCheckpoint, request, timeout_s, "RestoreCheckpoint")
        return int(reply.last_step)

    def _checkpoint(self, name: str, **fields: Any) -> pb.CheckpointRequest:
        return pb.CheckpointRequest(name=name, lease=self.lease, **fields)

    async def info(self, timeout_s: float) -> pb.CriticInfo:
        """The model behind the service, and the last step trained."""
        info: pb.CriticInfo = await self._call(self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info")
        return info


@contextmanager
def _expecting() -> Iterator[None]:
    """Context of a call that expects the critic in a certain state. CriticReset if it is in another."""
    try:
        yield
    except LeaseLost:
        raise
    except FailedPrecondition as error:
        raise CriticReset(str(error)) from None


def _steps(steps: list[int], pairs: int, least: int | None) -> list[int]:
    """Returns the steps; InvalidArgument unless there is one for each pair, and none before `least`."""
    if len(steps) != pairs or any(step < (least or 0) for step in steps):
        raise InvalidArgument(f"steps: {steps[:8]} for {pairs} pairs; must be one each, at least {least or 0}")
    return steps
