"""Client of the reference service."""

from collections.abc import Sequence

import grpc

from protos import common_pb2
from protos import reference_pb2 as pb
from protos.reference_pb2_grpc import ReferenceStub
from services.common.arrays import Floats, Ints, pack_pairs, split, unpack_floats
from services.common.client import ServiceClient


class ReferenceClient(ServiceClient[ReferenceStub]):
    """Log-probs under the frozen model."""

    def __init__(self, channel: grpc.aio.Channel, application: str = "reference") -> None:
        super().__init__(channel, ReferenceStub, application)

    async def logprobs(
        self, prompts: Sequence[Ints], responses: Sequence[Ints], *, temperature: float, timeout_s: float
    ) -> list[Floats]:
        """For each pair [T]: log pi_ref(y_t | prefix) at this temperature.

        Raises:
            ServiceError: the service's own, by its status; DeadlineExceeded after `timeout_s`.
        """
        request = pb.LogprobsRequest(pairs=pack_pairs(prompts, responses), temperature=temperature)
        reply = await self._call(self._stub.Logprobs, request, timeout_s, "Logprobs")
        values = unpack_floats(reply.ref_logprobs, "ref_logprobs")
        return split(values, [len(response) for response in responses], "ref_logprobs")

    async def info(self, timeout_s: float) -> pb.ReferenceInfo:
        """The model behind the service."""
        info: pb.ReferenceInfo = await self._call(self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info")
        return info
