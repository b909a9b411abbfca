"""The reward deployment, which only translates between protobuf and a scorer.

Import path for Serve: `services.reward.replica:build`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import serve

from protos import common_pb2
from protos import reward_pb2 as pb
from quartet.serving.admission import MOST_ONGOING, Admission
from quartet.serving.batcher import Batcher
from quartet.serving.desk import Desk
from quartet.serving.replica_process import prepare_replica
from quartet.serving.share import Share
from quartet.threads import DaemonThread
from services.reward.config import INGRESS, Hosted, RewardConfig, field_of
from services.reward.doors import Doors
from services.reward.encoding import Encoder, Received, size_of
from services.reward.ingress import Ingress
from services.reward.names import Listed, chosen

if TYPE_CHECKING:
    from services.reward.scorers.scorer import EncodedPair, Result, Scorer


@serve.deployment(
    name=INGRESS,
    max_ongoing_requests=MOST_ONGOING,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
)
class Reward(Doors):
    """One replica, one scorer."""

    def __init__(self, hosted: Hosted, make: "Callable[..., Scorer] | None" = None, name: str = "") -> None:
        """Loads the scorer, of which requests may say the name. `make` takes the place of `make_scorer`, for a scorer
        that is emulated."""
        # Imported here because Serve builds the application in a process that then need not load torch.
        from quartet.models.device import default_device
        from quartet.models.loading import load_tokenizer
        from services.reward.scorers.make import make_scorer

        prepare_replica()
        tokenizer = None if hosted.tokenizer is None else load_tokenizer(hosted.tokenizer)
        if tokenizer is not None:
            tokenizer("")  # drops what its file says of truncation now, since two threads use it later
        where, batch_s = f"reward.args.{field_of(name)}", hosted.limits.batch_s
        scorer = (make or make_scorer)(hosted.scorer, tokenizer, default_device(), where, batch_s)
        self._info = _described(hosted, name, tokenizer, scorer)
        self._admission = Admission(hosted.limits)
        self._batcher: Batcher[EncodedPair, Result] = Batcher(
            scorer.score,
            batch_tokens=scorer.batch_tokens,
            batch_s=batch_s if scorer.batch_s is None else scorer.batch_s,
            passes=scorer.passes,
            patience_s=scorer.patience_s,
        )
        self._encoder = Encoder(
            tokenizer,
            self._info.model.vocab_size,
            self._info.model.max_length,
            texts=scorer.texts,
            ids=scorer.vocab_size is not None,
            each=len(scorer.names) or 1,
        )
        self._desk, self._tokenizing = Desk(hosted.limits), DaemonThread("tokenizer")
        self._check = scorer.check
        self._open()

    async def check_health(self) -> None:
        """Raises if the scorer does not work: one that computes has a deadline, an idle one is tested."""
        await self._batcher.check_health(self._check)

    async def scored(self, request: pb.ScoreRequest, share: Share) -> pb.ScoreResponse:
        """The answer to a request of Score, of a caller of this share."""
        chosen(request.scorer, [self._info.name])
        received = Received(request)
        with self._admission.admitted(share, received.rows, received.tokens, received.field):
            call = self._encoder.call(received, share)
            await self._batcher.submit(share, call)
            if call.in_parts:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._tokenizing, call.response, self._info.identity)
        return call.response(self._info.identity)

    async def infos(self) -> pb.RewardInfo:
        """The answer to a request of Info."""
        return pb.RewardInfo(scorers=[self._info])

    async def token_ids(self, scorer: str, text: str, special: bool, share: Share) -> tuple[Sequence[int], int]:
        """The ids of a text, with special tokens or without, and the most that a pair may have. Texts are tokenised
        one at a time, beside the event loop: a long one takes a second."""
        chosen(scorer, [self._info.name])
        size = size_of(text)
        with self._admission.admitted(share, 1, size, "prompt"):
            async with self._desk.turn(share, size):
                loop = asyncio.get_running_loop()
                ids = await loop.run_in_executor(self._tokenizing, self._encoder.token_ids, text, special)
        return ids, self._info.model.max_length

    def label(self, scorer: str) -> str:
        """The scorer's name, or what it is if it has none."""
        return self._info.name or self._info.identity.name

    def listed(self) -> Mapping[str, Listed]:
        """The scorer by its name, or by what it is if it has none."""
        return {self.label(""): Listed(self._info.name, tuple(self._info.identity.names))}


def _described(hosted: Hosted, name: str, tokenizer: Any, scorer: "Scorer") -> pb.ScorerInfo:
    from quartet.wire.identity import describe_model, vocabulary_size

    length = min(hosted.max_length, scorer.max_length)
    if tokenizer is None or hosted.tokenizer is None:
        model = common_pb2.ModelInfo(max_length=length)
    else:
        model = describe_model(
            hosted.tokenizer,
            tokenizer,
            vocab_size=scorer.vocab_size or vocabulary_size(tokenizer),
            max_length=length,
            dtype=getattr(hosted.scorer, "dtype", "float32"),
        )
    return pb.ScorerInfo(name=name, model=model, identity=scorer.identity)


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args:` of the YAML file: one deployment, or one for each of several scorers
    and one that takes the calls."""
    hosted = RewardConfig.parse(args, "reward.args").hosted
    bound = {
        name: Reward.options(name=name if len(hosted) > 1 else INGRESS).bind(each, name=name)  # type: ignore[attr-defined]
        for name, each in hosted.items()
    }
    if len(bound) == 1:
        return next(iter(bound.values()))  # type: ignore[no-any-return]
    return Ingress.bind(bound, {name: each.scorer.names for name, each in hosted.items()})  # type: ignore[attr-defined, no-any-return]
