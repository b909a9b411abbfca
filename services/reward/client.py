"""Client of the reward service. It needs neither Ray nor torch, and works without a training run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from protos import common_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardStub
from quartet.columns import Columns
from quartet.wire.backoff import Deadline
from quartet.wire.client import ServiceClient
from quartet.wire.codec import Floats, unpack_floats
from quartet.wire.errors import InvalidArgument, InvalidReply
from quartet.wire.replies import one_each, reading
from quartet.wire.splitting import in_parts, some


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and the identity of their scorer."""

    values: Floats
    """The scores, [B] float32."""
    scorer: str
    """Name of the scorer, for instance "model:reward"."""
    model_hash: str
    """sha256 of the model's files or the function's source; scores with equal hashes can be compared."""


class RewardClient(ServiceClient[RewardStub]):
    """Asks for the scores of pairs."""

    SERVICE = "reward"
    STUB = RewardStub

    async def score(
        self,
        trajectories: Columns,
        *,
        labels: Sequence[str] = (),
        ended: Sequence[bool] = (),
        timeout_s: float,
    ) -> Scores:
        """Scores of B trajectories in ids of the service's tokenizer. Large calls are sent in parts.

        Args:
            trajectories: prompts and responses (`Columns.of_pairs`); further columns stay here.
            labels: one per trajectory, or empty; passed to function scorers.
            ended: True for each response that is complete; empty: judged by the response's last token.
            timeout_s: deadline in seconds.

        Raises:
            ServiceError: the service's error; DeadlineExceeded after `timeout_s`; InvalidReply if the answer has
                another length, or its parts come from different scorers.
        """

        bare = trajectories.select()

        def request(rows: range) -> pb.ScoreRequest:
            return pb.ScoreRequest(tokens=bare.take(rows).pack(), labels=some(labels, rows), ended=some(ended, rows))

        return await self._score(trajectories.lengths.tolist(), request, timeout_s)

    async def score_texts(
        self, prompts: Sequence[str], responses: Sequence[str], *, labels: Sequence[str] = (), timeout_s: float
    ) -> Scores:
        """Scores of pairs given as texts; all responses count as complete. Raises as `score` does."""
        if len(prompts) != len(responses):
            raise InvalidArgument(f"texts: {len(prompts)} prompts but {len(responses)} responses; send one for one")

        def request(rows: range) -> pb.ScoreRequest:
            texts = pb.TextPairs(prompts=some(prompts, rows), responses=some(responses, rows))
            return pb.ScoreRequest(texts=texts, labels=some(labels, rows))

        # An English token has three bytes or more; in other scripts a letter may take several tokens.
        sizes = [len(a.encode()) + len(b.encode()) for a, b in zip(prompts, responses, strict=True)]
        return await self._score([1 + size // 3 for size in sizes], request, timeout_s)

    async def _score(
        self, sizes: Sequence[int], request: Callable[[range], pb.ScoreRequest], timeout_s: float
    ) -> Scores:
        deadline = Deadline(timeout_s)
        call = f"{self.application}.Score"

        async def ask(rows: range) -> Scores:
            divisible = len(rows) > 1
            reply = await self._call(
                self._stub.Score, request(rows), deadline, "Score", anywhere=True, divisible=divisible
            )
            with reading(call):
                values = one_each(unpack_floats(reply.scores, "scores"), len(rows), "scores")
            return Scores(values, reply.scorer.name, reply.scorer.model_hash)

        parts = await in_parts(sizes, ask)
        names = {(part.scorer, part.model_hash) for part in parts}
        if len(names) > 1:
            raise InvalidReply(
                f"{call}: parts of one call were scored by {len(names)} scorers; is it being replaced?"
            )
        return Scores(np.concatenate([part.values for part in parts]), parts[0].scorer, parts[0].model_hash)

    async def info(self, timeout_s: float) -> pb.RewardInfo:
        """The scorer behind the service."""
        info: pb.RewardInfo = await self._call(
            self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info", anywhere=True
        )
        return info
