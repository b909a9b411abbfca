"""Client of the reference service."""

from collections.abc import Sequence

from protos import common_pb2
from protos import reference_pb2 as pb
from protos.reference_pb2_grpc import ReferenceStub
from quartet.wire.backoff import Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, Ints, pack_pairs, split, unpack_floats
from quartet.wire.replies import reading
from quartet.wire.splitting import in_parts, select, tokens_of


class ReferenceClient(ServiceClient[ReferenceStub]):
    """Asks for log-probs under the frozen model."""

    SERVICE = "reference"
    STUB = ReferenceStub

    async def logprobs(
        self,
        prompts: Sequence[Ints],
        responses: Sequence[Ints],
        *,
        temperature: float,
        min_new_tokens: int = 0,
        end_ids: Sequence[int] = (),
        timeout_s: float,
    ) -> list[Floats]:
        """The log-probs log pi_ref(y_t | prefix) at this temperature, [T] for each pair. Tokens of `end_ids` have
        probability 0 among the first `min_new_tokens`.

        Raises:
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`.
        """
        deadline = Deadline(timeout_s)

        async def ask(rows: range) -> list[Floats]:
            some, their = select(rows, prompts, responses)
            request = pb.LogprobsRequest(
                pairs=pack_pairs(some, their),
                temperature=temperature,
                min_new_tokens=min_new_tokens,
                end_ids=end_ids,
            )
            reply = await self._call(
                self._stub.Logprobs, request, deadline, "Logprobs", anywhere=True, divisible=len(rows) > 1
            )
            with reading(f"{self.application}.Logprobs"):
                values = unpack_floats(reply.ref_logprobs, "ref_logprobs")
                return split(values, [len(response) for response in their], "ref_logprobs")

        return [row for rows in await in_parts(tokens_of(prompts, responses), ask) for row in rows]

    async def info(self, timeout_s: float) -> pb.ReferenceInfo:
        """The model behind the service."""
        info: pb.ReferenceInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        return info
