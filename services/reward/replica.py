"""The reward deployment, which only translates between protobuf and a scorer.

Import path for Serve: `services.reward.replica:build`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray import serve

from protos import common_pb2
from protos import reward_pb2 as pb
from quartet.serving.admission import MOST_ONGOING, Admission
from quartet.serving.batcher import Batcher
from quartet.serving.health import HealthMixin
from quartet.serving.replica_process import prepare_replica
from quartet.serving.servicer import translated
from quartet.serving.share import Share
from services.reward.config import RewardConfig

if TYPE_CHECKING:
    from services.reward.scorers.scorer import Result, Scored, Scorer


@serve.deployment(
    name="Reward",
    max_ongoing_requests=MOST_ONGOING,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
)
class Reward(HealthMixin):
    """One replica, one scorer."""

    def __init__(self, config: RewardConfig, make: "Callable[..., Scorer] | None" = None) -> None:
        """Loads the scorer. `make` takes the place of `make_scorer`, for a scorer that is emulated."""
        # Imported here because Serve builds the application in a process that then need not load torch.
        from quartet.models.device import default_device
        from quartet.models.loading import load_tokenizer
        from quartet.wire.identity import describe_model, vocabulary_size
        from services.reward.encoding import Encoder, Received
        from services.reward.scorers.make import make_scorer

        prepare_replica()
        tokenizer = load_tokenizer(config.tokenizer)
        scorer = (make or make_scorer)(config.scorer, tokenizer, default_device())
        self._scorer = scorer.identity
        self._admission = Admission(config.limits)
        self._batcher: Batcher[Scored, Result] = Batcher(
            scorer.score,
            batch_tokens=scorer.batch_tokens,
            batch_s=config.limits.batch_s,
        )
        self._model = describe_model(
            config.tokenizer,
            tokenizer,
            vocab_size=scorer.vocab_size or vocabulary_size(tokenizer),
            max_length=min(config.max_length, scorer.max_length),
            dtype=getattr(config.scorer, "dtype", "float32"),
        )
        self._encoder = Encoder(
            tokenizer,
            self._model.vocab_size,
            self._model.max_length,
            texts=scorer.texts,
            each=len(scorer.names) or 1,
        )
        self._received = Received
        self._check = scorer.check

    async def check_health(self) -> None:
        """Raises if the scorer does not work: one that computes has a deadline, an idle one is tested."""
        await self._batcher.check_health(self._check)

    @translated
    async def Score(self, request: pb.ScoreRequest, share: Share) -> pb.ScoreResponse:
        """Scores pairs given as ids or as texts."""
        received = self._received(request)
        with self._admission.admitted(share, received.rows, received.tokens, received.field):
            call = self._encoder.call(received)
            await self._batcher.submit(share, call)
        return call.response(self._scorer)

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.RewardInfo:
        """Describes the scorer and the tokenizer."""
        return pb.RewardInfo(model=self._model, scorer=self._scorer)


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args:` of the YAML file."""
    return Reward.bind(RewardConfig.parse(args, "reward.args"))  # type: ignore[attr-defined, no-any-return]
