"""Client of the reference service."""

from collections.abc import Sequence

import numpy as np

from protos import common_pb2
from protos import reference_pb2 as pb
from protos.reference_pb2_grpc import ReferenceStub
from quartet.columns import Columns
from quartet.wire.backoff import Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, unpack_floats
from quartet.wire.replies import one_each, reading
from quartet.wire.splitting import in_parts


class ReferenceClient(ServiceClient[ReferenceStub]):
    """Asks for log-probs under the frozen model."""

    SERVICE = "reference"
    STUB = ReferenceStub

    async def logprobs(
        self,
        trajectories: Columns,
        *,
        temperature: float,
        min_new_tokens: int = 0,
        end_ids: Sequence[int] = (),
        timeout_s: float,
    ) -> Floats:
        """The log-probs log pi_ref(y_t | prefix) of all sampled tokens at this temperature, [M], trajectories end to
        end. Tokens of `end_ids` have probability 0 among the first `min_new_tokens` of a response.

        Raises:
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`.
        """
        deadline, bare = Deadline(timeout_s), trajectories.select()

        async def ask(rows: range) -> Floats:
            part = bare.take(rows)
            request = pb.LogprobsRequest(
                trajectories=part.pack(),
                temperature=temperature,
                min_new_tokens=min_new_tokens,
                end_ids=end_ids,
            )
            reply = await self._call(
                self._stub.Logprobs, request, deadline, "Logprobs", anywhere=True, divisible=len(rows) > 1
            )
            with reading(f"{self.application}.Logprobs"):
                values = unpack_floats(reply.ref_logprobs, "ref_logprobs")
                return one_each(values, part.size("sampled"), "ref_logprobs", "sampled tokens")

        return np.concatenate(await in_parts(trajectories.lengths.tolist(), ask))

    async def info(self, timeout_s: float) -> pb.ReferenceInfo:
        """The model behind the service."""
        info: pb.ReferenceInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        return info
