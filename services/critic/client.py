"""Client of the critic service."""

from collections.abc import Sequence

import grpc

from protos import common_pb2
from protos import critic_pb2 as pb
from protos.critic_pb2_grpc import CriticStub
from services.common.arrays import Floats, Ints, pack_floats, pack_pairs, split, unpack_floats, unpack_metrics
from services.common.client import ServiceClient


class CriticClient(ServiceClient[CriticStub]):
    """Values, and the critic's training."""

    def __init__(self, channel: grpc.aio.Channel, application: str = "critic") -> None:
        super().__init__(channel, CriticStub, application)

    async def values(self, prompts: Sequence[Ints], responses: Sequence[Ints], *, timeout_s: float) -> list[Floats]:
        """For each pair [T]: V(prefix) before each response token.

        Raises:
            ServiceError: the service's own, by its status; DeadlineExceeded after `timeout_s`.
        """
        request = pb.ValuesRequest(pairs=pack_pairs(prompts, responses))
        reply = await self._call(self._stub.Values, request, timeout_s, "Values")
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
        timeout_s: float,
    ) -> dict[str, float]:
        """Trains on one PPO batch, at most once per step id; the mean metrics of its optimizer steps.

        Raises:
            FailedPrecondition: a later step was trained already.
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
        )
        reply = await self._call(self._stub.Train, request, timeout_s, "Train")
        return unpack_metrics(reply.metrics)

    async def save(self, path: str, timeout_s: float) -> str:
        """Has the critic write a checkpoint on its own disk; the absolute path."""
        reply = await self._call(self._stub.Save, pb.SaveRequest(path=path), timeout_s, "Save")
        return str(reply.path)

    async def info(self, timeout_s: float) -> pb.CriticInfo:
        """The model behind the service, and the last step trained."""
        info: pb.CriticInfo = await self._call(self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info")
        return info
