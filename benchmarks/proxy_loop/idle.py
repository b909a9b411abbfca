"""A service that answers at once, with any method of those that are measured."""

import asyncio
from typing import Any

from ray import serve

from protos import critic_pb2, reward_pb2, rollout_pb2
from services.common.serving.servicer import translated
from services.common.wire.codec import PackedPairs


@serve.deployment(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0})
class Idle:
    """Stands for any service. Answers at once, and Values when Adopt is called."""

    def __init__(self) -> None:
        self._released = asyncio.Event()

    @translated
    async def UpdateWeights(self, request: rollout_pb2.WeightPhase) -> rollout_pb2.WeightReports:
        """Nothing."""
        return rollout_pb2.WeightReports()

    @translated
    async def Score(self, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        """Nothing."""
        return reward_pb2.ScoreResponse()

    @translated
    async def Stage(self, request: critic_pb2.StageRequest) -> critic_pb2.StageResponse:
        """Nothing."""
        return critic_pb2.StageResponse()

    @translated
    async def Values(self, request: critic_pb2.ValuesRequest) -> critic_pb2.ValuesResponse:
        """Nothing, after a while, with the request at hand as a service has it that waits for its model."""
        packed = PackedPairs.of(request.pairs)
        await self._released.wait()
        return critic_pb2.ValuesResponse(steps=packed.prompts.token_ids[:8])

    @translated
    async def Adopt(self, request: critic_pb2.AdoptRequest) -> critic_pb2.AdoptResponse:
        """Lets Values answer."""
        self._released.set()
        return critic_pb2.AdoptResponse()


def build(arguments: dict[str, Any]) -> serve.Application:
    """Called by Serve."""
    return Idle.options(name=arguments["name"]).bind()  # type: ignore[attr-defined, no-any-return]
