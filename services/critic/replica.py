"""The critic deployment: translates between protobuf and the trainer, and nothing else.

One replica is one critic: values and training share its weights. Import path: `services.critic.replica:build`.
"""

from typing import Any

from ray import serve

from protos import common_pb2
from protos import critic_pb2 as pb
from services.common.arrays import pack_floats, pack_metrics, split, unpack_finite, unpack_pairs
from services.common.errors import InvalidArgument, translated
from services.common.replica import HealthMixin
from services.critic.config import CriticConfig


@serve.deployment(name="Critic", max_ongoing_requests=256, health_check_period_s=5, graceful_shutdown_timeout_s=10)
class Critic(HealthMixin):
    """One replica, one value model."""

    async def __init__(self, config: CriticConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        # Here and not above: Serve builds the application in a process that needs no torch, seconds sooner.
        from services.common.identity import describe_model
        from services.common.models import load_tokenizer
        from services.critic.model import CriticModel
        from services.critic.trainer import CriticBatch

        self._config = config
        self._batch = CriticBatch
        self._critic = CriticModel(config)
        vocab_size, max_length = await self._critic.start()
        self._model = describe_model(
            config.model,
            load_tokenizer(config.model),
            vocab_size=vocab_size,
            max_length=max_length,
            dtype=config.dtype,
        )

    def __del__(self) -> None:
        critic = getattr(self, "_critic", None)
        if critic is not None:
            critic.stop()

    async def check_health(self) -> None:
        """Serve restarts the replica when a rank has died or is stuck. The weights begin anew."""
        self._critic.check()

    @translated
    async def Values(self, request: pb.ValuesRequest) -> pb.ValuesResponse:
        """See critic.proto."""
        prompts, responses = self._pairs(request.pairs)
        values = await self._critic.values(prompts, responses, _last_step(request))
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

        metrics = await self._critic.train(
            request.step,
            batch,
            _last_step(request),
            epochs=request.epochs,
            minibatch_size=request.minibatch_size,
            seed=request.seed,
        )
        return pb.TrainResponse(metrics=pack_metrics(metrics))

    @translated
    async def Save(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """See critic.proto."""
        if not request.path:
            raise InvalidArgument("path: required")
        return pb.SaveResponse(path=str(await self._critic.save(request.path)))

    @translated
    async def TakeCheckpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        """See critic.proto."""
        await self._critic.take_checkpoint(request.path, request.last_step, not request.without_copies)
        return pb.CheckpointResponse(last_step=self._critic.last_step)

    @translated
    async def WriteCheckpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        """See critic.proto."""
        await self._critic.write_checkpoint(request.path)
        return pb.CheckpointResponse(last_step=self._critic.last_step)

    @translated
    async def RestoreCheckpoint(self, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        """See critic.proto."""
        return pb.CheckpointResponse(last_step=await self._critic.restore_checkpoint(request.path))

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.CriticInfo:
        """See critic.proto."""
        return pb.CriticInfo(model=self._model, last_step=self._critic.last_step, initialised_from=self._config.model)

    def _pairs(self, pairs: common_pb2.Pairs) -> Any:
        return unpack_pairs(pairs, vocab_size=self._model.vocab_size, max_length=self._model.max_length)


def _last_step(request: pb.ValuesRequest | pb.TrainRequest) -> int | None:
    return int(request.last_step) if request.HasField("last_step") else None


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args:` of the YAML file."""
    return Critic.bind(CriticConfig.parse(args, "critic.args"))  # type: ignore[attr-defined, no-any-return]
