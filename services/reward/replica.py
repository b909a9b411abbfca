"""The reward deployment: translates between protobuf and a scorer, and nothing else.

Import path for Serve: `services.reward.replica:build`.
"""

import asyncio
from typing import Any

import numpy as np
from ray import serve

from protos import common_pb2
from protos import reward_pb2 as pb
from services.common.arrays import pack_floats
from services.common.errors import translated
from services.common.replica import HealthMixin
from services.reward.config import RewardConfig


@serve.deployment(name="Reward", max_ongoing_requests=256, health_check_period_s=5, graceful_shutdown_timeout_s=10)
class Reward(HealthMixin):
    """One replica, one scorer."""

    def __init__(self, config: RewardConfig) -> None:
        # Here and not above: Serve builds the application in a process that needs no torch, seconds sooner.
        from services.common.batcher import Batcher
        from services.common.device import default_device
        from services.common.identity import describe_model
        from services.common.models import load_tokenizer
        from services.reward.encoding import Encoder
        from services.reward.scorers import Scored, make_scorer

        tokenizer = load_tokenizer(config.tokenizer)
        scorer = make_scorer(config.scorer, tokenizer, default_device())
        self._scorer = scorer.identity
        self._batcher: Batcher[Scored, np.float32] = Batcher(scorer.score, max_items=config.max_waiting)
        self._model = describe_model(
            config.tokenizer,
            tokenizer,
            vocab_size=len(tokenizer),
            max_length=min(config.max_length, scorer.max_length),
            dtype=getattr(config.scorer, "dtype", "float32"),
        )
        self._encoder = Encoder(tokenizer, len(tokenizer), self._model.max_length)
        self._check = scorer.check

    async def check_health(self) -> None:
        """The scorer answers, not just the process. One that works is not asked: a long queue is no illness."""
        if not self._batcher.busy:
            await asyncio.to_thread(self._check)

    @translated
    async def Score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        """See reward.proto."""
        scores = await self._batcher.submit(self._encoder.decode(request))
        return pb.ScoreResponse(scores=pack_floats(np.asarray(scores, np.float32)), scorer=self._scorer)

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.RewardInfo:
        """See reward.proto."""
        return pb.RewardInfo(model=self._model, scorer=self._scorer)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args:` of the YAML file."""
    return Reward.bind(RewardConfig.parse(args, "reward.args"))  # type: ignore[attr-defined, no-any-return]
