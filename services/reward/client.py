"""Client of the reward service. Needs grpcio and numpy, and no training run around it."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from protos import common_pb2
from protos import reward_pb2 as pb
from protos.reward_pb2_grpc import RewardStub
from services.common.arrays import Floats, Ints, pack_pairs, unpack_floats
from services.common.client import ServiceClient


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores and what gave them."""

    values: Floats
    """[B] float32"""
    scorer: str
    """For instance "model:models/reviews/reward"."""
    model_hash: str
    """sha256 of the model's files or the function's source: equal hashes, comparable scores."""


class RewardClient(ServiceClient[RewardStub]):
    """Scores pairs."""

    def __init__(self, channel: grpc.aio.Channel, application: str = "reward") -> None:
        super().__init__(channel, RewardStub, application)

    async def score(
        self,
        prompts: Sequence[Ints],
        responses: Sequence[Ints],
        *,
        labels: Sequence[str] = (),
        timeout_s: float,
    ) -> Scores:
        """Scores of pairs given as ids of the service's tokenizer, each [P] and [T].

        Raises:
            ServiceError: the service's own, by its status; DeadlineExceeded after `timeout_s`.
        """
        request = pb.ScoreRequest(tokens=pack_pairs(prompts, responses), labels=labels)
        return await self._score(request, timeout_s)

    async def score_texts(
        self, prompts: Sequence[str], responses: Sequence[str], *, labels: Sequence[str] = (), timeout_s: float
    ) -> Scores:
        """Scores of pairs given as texts, the responses taken as complete. Raises as `score` does."""
        texts = pb.TextPairs(prompts=prompts, responses=responses)
        return await self._score(pb.ScoreRequest(texts=texts, labels=labels), timeout_s)

    async def _score(self, request: pb.ScoreRequest, timeout_s: float) -> Scores:
        reply = await self._call(self._stub.Score, request, timeout_s, "Score")
        return Scores(unpack_floats(reply.scores, "scores"), reply.scorer.name, reply.scorer.model_hash)

    async def info(self, timeout_s: float) -> pb.RewardInfo:
        """The scorer behind the service."""
        info: pb.RewardInfo = await self._call(self._stub.Info, common_pb2.InfoRequest(), timeout_s, "Info")
        return info
