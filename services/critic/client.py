"""Client of the critic service."""

from collections.abc import Sequence
from typing import Any

import grpc

from protos import common_pb2
from protos import critic_pb2 as pb
from protos.critic_pb2_grpc import CriticStub
from services.common.arrays import Floats, Ints, pack_floats, pack_pairs, split, unpack_floats, unpack_metrics
from services.common.client import ServiceClient
from services.common.errors import FailedPrecondition


class CriticReset(FailedPrecondition):
    """The critic is not in the state that was expected: it was replaced and began anew, or another run trained it."""


class CriticClient(ServiceClient[CriticStub]):
    """Values, and the critic's training."""

    def __init__(self, channel: grpc.aio.Channel, application: str = "critic") -> None:
        super().__init__(channel, CriticStub, application)

    async def values(
        self,
        prompts: Sequence[Ints],
        responses: Sequence[Ints],
        *,
        last_step: int | None = None,
        timeout_s: float,
    ) -> list[Floats]:
        """For each pair [T]: V(prefix) before each response token.

        Args:
            prompts: token ids, each [P].
            responses: token ids, each [T].
            last_step: the step that the critic must have trained last; None takes it as it is.
            timeout_s: deadline.

        Raises:
            CriticReset: it trained another step last.
            ServiceError: the service's own, by its status; DeadlineExceeded after `timeout_s`.
        """
        request = pb.ValuesRequest(pairs=pack_pairs(prompts, responses), last_step=last_step)
        reply = await self._expecting(self._stub.Values, request, timeout_s, "Values")
        values = unpack_floats(reply.values, "values")
        return split(values, [len(response) for response in responses], "values")

    async def train(
        self,
        step: int,
        prompts: Sequence[Ints],
        responses: Sequence[Ints],
        values: Sequence[Floats],
        returns: Sequence[Floats],
        *,
        epochs: int,
        minibatch_size: int,
        seed: int,
        last_step: int | None = None,
        timeout_s: float,
    ) -> dict[str, float]:
        """Trains on one PPO batch, at most once per step id; the mean metrics of its optimizer steps.

        Raises:
            CriticReset: a later step was trained already, or another than `last_step`, if given, came before.
            ServiceError: the service's own, by its status; DeadlineExceeded after `timeout_s`.
        """
        request = pb.TrainRequest(
            step=step,
            pairs=pack_pairs(prompts, responses),
            values=pack_floats(values),
            returns=pack_floats(returns),
            epochs=epochs,
            minibatch_size=minibatch_size,
            seed=seed,
            last_step=last_step,
        )
        reply = await self._expecting(self._stub.Train, request, timeout_s, "Train")
        return unpack_metrics(reply.metrics)

    async def save(self, path: str, timeout_s: float) -> str:
        """Has the critic write its model on its own disk; the absolute path."""
        reply = await self._call(self._stub.Save, pb.SaveRequest(path=path), timeout_s, "Save")
        return str(reply.path)

    async def take_checkpoint(self, path: str, last_step: int, timeout_s: float, *, copies: bool = True) -> None:
        """Has the critic copy its state after `last_step`, for `write_checkpoint` to bring to `path`; without copies,
        has it written there at once.

        Raises:
            CriticReset: its last step is another.
        """
        request = pb.CheckpointRequest(path=path, last_step=last_step, without_copies=not copies)
        await self._expecting(self._stub.TakeCheckpoint, request, timeout_s, "TakeCheckpoint")

    async def write_checkpoint(self, path: str, timeout_s: float) -> None:
        """Returns when what was taken for `path` is on disk.

        Raises:
            CriticReset: nothing was, or it was lost with the replica that held it.
        """
        request = pb.CheckpointRequest(path=path)
        await self._expecting(self._stub.WriteCheckpoint, request, timeout_s, "WriteCheckpoint")

    async def restore_checkpoint(self, path: str, timeout_s: float) -> int:
        """Has the critic go on from the checkpoint; the last step that it holds.

        Raises:
            InvalidArgument: there is none, or it is of another layout.
        """
        request = pb.CheckpointRequest(path=path)
        reply = await self._call(self._stub.RestoreCheckpoint, request, timeout_s, "RestoreCheckpoint")
        return int(reply.last_step)

    async def _expecting(self, method: Any, request: Any, timeout_s: float, name: str) -> Any:
        try:
            return await self._call(method, request, timeout_s, name)
        except FailedPrecondition as error:
            raise CriticReset(str(error)) from None

    async def info(self, timeout_s: float) -> pb.CriticInfo:
        """The model behind the service, and the last step trained."""
        info: pb.CriticInfo = await self._call(self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info")
        return info
