"""The reference deployment: translates between protobuf and the frozen model, and nothing else.

Import path for Serve: `services.reference.replica:build`.
"""

import asyncio
import math
from typing import Any

from ray import serve

from protos import common_pb2
from protos import reference_pb2 as pb
from services.common.arrays import Floats, pack_floats, unpack_pairs
from services.common.errors import InvalidArgument, translated
from services.common.replica import HealthMixin
from services.reference.config import ReferenceConfig


@serve.deployment(name="Reference", max_ongoing_requests=256, health_check_period_s=5, graceful_shutdown_timeout_s=10)
class Reference(HealthMixin):
    """One replica, one frozen model."""

    def __init__(self, config: ReferenceConfig) -> None:
        # Here and not above: Serve builds the application in a process that needs no torch, seconds sooner.
        from services.common.batcher import Batcher
        from services.common.device import default_device, gpu_count
        from services.common.identity import describe_model
        from services.common.models import load_tokenizer, max_length
        from services.reference.logprobs import FrozenModel, Question

        frozen = FrozenModel(config, default_device(), gpu_count())
        self._question = Question
        self._batcher: Batcher[Question, Floats] = Batcher(frozen.logprobs, max_items=config.max_waiting)
        self._model = describe_model(
            config.model,
            load_tokenizer(config.model),
            vocab_size=int(frozen.model.config.vocab_size),
            max_length=max_length(frozen.model),
            dtype=config.dtype,
        )
        self._check = frozen.check

    async def check_health(self) -> None:
        """The model answers, not just the process. One that works is not asked: a long queue is no illness."""
        if not self._batcher.busy:
            await asyncio.to_thread(self._check)

    @translated
    async def Logprobs(self, request: pb.LogprobsRequest) -> pb.LogprobsResponse:
        """See reference.proto."""
        temperature = request.temperature if request.HasField("temperature") else 1.0
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InvalidArgument(f"temperature: {temperature:g}; must be more than 0")
        prompts, responses = unpack_pairs(
            request.pairs, vocab_size=self._model.vocab_size, max_length=self._model.max_length
        )
        questions = [self._question(p, r, temperature) for p, r in zip(prompts, responses, strict=True)]
        return pb.LogprobsResponse(ref_logprobs=pack_floats(list(await self._batcher.submit(questions))))

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.ReferenceInfo:
        """See reference.proto."""
        return pb.ReferenceInfo(model=self._model)


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from the `args:` of the YAML file."""
    return Reference.bind(ReferenceConfig.parse(args, "reference.args"))  # type: ignore[attr-defined, no-any-return]
