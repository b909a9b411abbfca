"""The critic deployment: translates between protobuf and the trainer, and nothing else.

One replica is one critic: values and training share its weights. Import path: `services.critic.replica:build`.
"""

from collections.abc import Awaitable
from typing import Any

from ray import serve

from protos import common_pb2
from protos import critic_pb2 as pb
from services.common.arrays import pack_floats, pack_metrics, split, unpack_finite, unpack_pairs
from services.common.errors import InvalidArgument, translated
from services.common.rank_group import RankFailed, RankGroup
from services.common.replica import HealthMixin
from services.critic.config import CriticConfig
from services.critic.once import Once


@serve.deployment(name="Critic", max_ongoing_requests=256, health_check_period_s=5, graceful_shutdown_timeout_s=10)
class Critic(HealthMixin):
    """One replica, one value model."""

    async def __init__(self, config: CriticConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        # Here and not above: Serve builds the application in a process that needs no torch, seconds sooner.
        from services.common.identity import describe_model
        from services.common.models import load_tokenizer
        from services.critic.trainer import CriticBatch, CriticTrainer

        self._config = config
        self._ranks = start_ranks(config)
        await self._ranks.start(CriticTrainer, config, timeout_s=config.rank_timeout_s)
        self._batch = CriticBatch
        self._once: Once[dict[str, float]] = Once()
        vocab_size, max_length = await self._run("limits")
        self._model = describe_model(
            config.model,
            load_tokenizer(config.model),
            vocab_size=vocab_size,
            max_length=max_length,
            dtype=config.dtype,
        )

    def __del__(self) -> None:
        ranks = getattr(self, "_ranks", None)
        if ranks is not None:
            ranks.stop()

    async def check_health(self) -> None:
        """Serve restarts the replica when a rank has died or is stuck. The weights begin anew."""
        self._ranks.check()

    @translated
    async def Values(self, request: pb.ValuesRequest) -> pb.ValuesResponse:
        """See critic.proto."""
        prompts, responses = self._pairs(request.pairs)
        values = await self._run("values", prompts, responses)
        return pb.ValuesResponse(values=pack_floats(values))

    @translated
    async def Train(self, request: pb.TrainRequest) -> pb.TrainResponse:
        """See critic.proto."""
        prompts, responses = self._pairs(request.pairs)
        lengths = [len(response) for response in responses]
        batch = self._batch(
            prompts=prompts,
            responses=responses,
            values=split(unpack_finite(request.values, "values"), lengths, "values"),
            returns=split(unpack_finite(request.returns, "returns"), lengths, "returns"),
        )
        for field, least in (("step", 1), ("epochs", 1), ("minibatch_size", 1), ("seed", 0)):
            if getattr(request, field) < least:
                raise InvalidArgument(f"{field}: {getattr(request, field)}; must be at least {least}")

        def train() -> Awaitable[dict[str, float]]:
            return self._run(
                "train", batch, epochs=request.epochs, minibatch_size=request.minibatch_size, seed=request.seed
            )

        metrics = await self._once.run(request.step, train)
        return pb.TrainResponse(metrics=pack_metrics(metrics))

    @translated
    async def Save(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """See critic.proto."""
        if not request.path:
            raise InvalidArgument("path: required")
        path = await self._run("save", request.path)
        return pb.SaveResponse(path=str(path))

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.CriticInfo:
        """See critic.proto."""
        return pb.CriticInfo(model=self._model, last_step=self._once.last_step, initialised_from=self._config.model)

    def _pairs(self, pairs: common_pb2.Pairs) -> Any:
        return unpack_pairs(pairs, vocab_size=self._model.vocab_size, max_length=self._model.max_length)

    async def _run(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return await self._ranks.call(method, *arguments, timeout_s=self._config.rank_timeout_s, **options)
        except RankFailed as error:
            # No ServiceError: `translated` keeps its text from the caller.
            raise RuntimeError(str(error)) from error


def start_ranks(config: CriticConfig) -> RankGroup:
    """The critic's ranks, without a model yet: one in this process, several as Ray actors."""
    if config.ranks == 1:
        from services.common.thread_rank import ThreadRank

        return RankGroup("critic", [ThreadRank(config.rank_timeout_s)])
    from services.common.ray_rank import ray_ranks

    return ray_ranks("critic", config)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args:` of the YAML file."""
    return Critic.bind(CriticConfig.parse(args, "critic.args"))  # type: ignore[attr-defined, no-any-return]
