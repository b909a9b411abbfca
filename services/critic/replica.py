"""The critic deployment: translates between protobuf and the trainer, and nothing else.

One replica is one critic: values and training share its weights. Import path: `services.critic.replica:build`.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve

from protos import common_pb2
from protos import critic_pb2 as pb
from services.common.arrays import pack_floats, pack_metrics, split, unpack_finite, unpack_pairs
from services.common.errors import InvalidArgument, translated
from services.common.replica import HealthMixin
from services.critic.config import CriticConfig
from services.critic.once import Once


@serve.deployment(name="Critic", max_ongoing_requests=256, health_check_period_s=5, graceful_shutdown_timeout_s=10)
class Critic(HealthMixin):
    """One replica, one value model."""

    def __init__(self, config: CriticConfig) -> None:
        # Here and not above: Serve builds the application in a process that needs no torch, seconds sooner.
        from services.common.identity import describe_model
        from services.common.models import load_tokenizer
        from services.critic.trainer import CriticBatch, CriticTrainer

        self._config = config
        # One thread: values and training take turns, and every value comes from one set of weights.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="critic")
        self._trainer = self._thread.submit(CriticTrainer, config).result()
        self._batch = CriticBatch
        self._once: Once[dict[str, float]] = Once()
        vocab_size, max_length = self._trainer.limits()
        self._model = describe_model(
            config.model,
            load_tokenizer(config.model),
            vocab_size=vocab_size,
            max_length=max_length,
            dtype=config.dtype,
        )

    async def check_health(self) -> None:
        """The trainer's thread takes work, or is busy training."""
        if self._thread._shutdown:
            raise RuntimeError("the critic's thread is gone")

    @translated
    async def Values(self, request: pb.ValuesRequest) -> pb.ValuesResponse:
        """See critic.proto."""
        prompts, responses = self._pairs(request.pairs)
        values = await self._run(self._trainer.values, prompts, responses)
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

        def train() -> dict[str, float]:
            metrics: dict[str, float] = self._trainer.train(
                batch, epochs=request.epochs, minibatch_size=request.minibatch_size, seed=request.seed
            )
            return metrics

        metrics = await self._once.run(request.step, lambda: self._run(train))
        return pb.TrainResponse(metrics=pack_metrics(metrics))

    @translated
    async def Save(self, request: pb.SaveRequest) -> pb.SaveResponse:
        """See critic.proto."""
        if not request.path:
            raise InvalidArgument("path: required")
        path = await self._run(self._trainer.save, request.path)
        return pb.SaveResponse(path=str(path))

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.CriticInfo:
        """See critic.proto."""
        return pb.CriticInfo(model=self._model, last_step=self._once.last_step, initialised_from=self._config.model)

    def _pairs(self, pairs: common_pb2.Pairs) -> Any:
        return unpack_pairs(pairs, vocab_size=self._model.vocab_size, max_length=self._model.max_length)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args:` of the YAML file."""
    return Critic.bind(CriticConfig.parse(args, "critic.args"))  # type: ignore[attr-defined, no-any-return]
