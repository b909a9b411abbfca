"""All four services in one process without models: they answer at once, with as many numbers as they would.

    python -m benchmarks.emulated.answers

Prints its port, and serves until it is ended. Imports neither Ray nor torch.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from protos import critic_pb2, reference_pb2, reward_pb2
from protos import rollout_pb2 as pb
from protos.critic_pb2_grpc import CriticServicer, add_CriticServicer_to_server
from protos.reference_pb2_grpc import ReferenceServicer, add_ReferenceServicer_to_server
from protos.reward_pb2_grpc import RewardServicer, add_RewardServicer_to_server
from protos.rollout_pb2_grpc import RolloutServicer, add_RolloutServicer_to_server
from quartet.columns import Columns
from quartet.wire.codec import pack_floats, pack_longs, pack_metrics, unpack_sequences
from services.rollout.sample import FinishReason, Sample

TOGETHER = 32
"""Samples in one message of Generate."""


class Answers(RolloutServicer, RewardServicer, ReferenceServicer, CriticServicer):  # type: ignore[misc]
    """All four services."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Responses as long as they may be, of the version that is asked for, some in each message."""
        count, tokens = (
            len(unpack_sequences(request.prompts, "prompts", vocab_size=1 << 20)),
            request.sampling.max_new_tokens,
        )
        ids, logprobs = np.full(tokens, 9, np.int32), np.full(tokens, -1.0, np.float32)
        spans = ((request.min_version, 0, tokens),)
        samples = [Sample(index, ids, logprobs, FinishReason.STOP, spans) for index in range(count)]
        for first in range(0, count, TOGETHER):
            wire = [sample.to_wire() for sample in samples[first : first + TOGETHER]]
            yield pb.GenerateResponse(segments=wire, replica="a")

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        """A score for each response."""
        count, _ = Columns.measure(request.tokens)
        scores = pack_floats(np.arange(count, dtype=np.float32))
        return reward_pb2.ScoreResponse(scores=scores, scorer={"name": "emulated"})

    async def Logprobs(self, request: reference_pb2.LogprobsRequest, context: Any) -> reference_pb2.LogprobsResponse:
        """Log-probs of each token."""
        sampled = Columns.unpack(request.trajectories, {}).size("sampled")
        return reference_pb2.LogprobsResponse(ref_logprobs=pack_floats(np.full(sampled, -1.5, np.float32)))

    async def Values(self, request: critic_pb2.ValuesRequest, context: Any) -> critic_pb2.ValuesResponse:
        """Values of each token, by the step that is asked for."""
        columns = Columns.unpack(request.trajectories, {})
        values = pack_floats(np.full(columns.size("sampled"), 0.5, np.float32))
        return critic_pb2.ValuesResponse(values=values, steps=pack_longs([request.min_step] * len(columns)))

    async def Stage(self, request: critic_pb2.StageRequest, context: Any) -> critic_pb2.StageResponse:
        """Takes a part of a batch."""
        return critic_pb2.StageResponse()

    async def Train(self, request: critic_pb2.TrainRequest, context: Any) -> critic_pb2.TrainResponse:
        """Trains nothing."""
        return critic_pb2.TrainResponse(metrics=pack_metrics({"loss": 0.0}))


async def serve() -> None:
    """Serves for ever."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    answers = Answers()
    adding: list[Any] = [
        add_RolloutServicer_to_server,
        add_RewardServicer_to_server,
        add_ReferenceServicer_to_server,
        add_CriticServicer_to_server,
    ]
    for add in adding:
        add(answers, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve())
