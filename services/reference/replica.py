"""The reference deployment, which only translates between protobuf and the frozen model.

Import path for Serve: `services.reference.replica:build`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve

from protos import common_pb2
from protos import reference_pb2 as pb
from quartet.columns import Columns
from quartet.serving.admission import MOST_ONGOING, Admission
from quartet.serving.batcher import Batcher
from quartet.serving.health import HealthMixin
from quartet.serving.replica_process import prepare_replica
from quartet.serving.servicer import translated
from quartet.serving.share import Share
from quartet.serving.token_call import TokenCall
from quartet.wire.codec import Floats, pack_floats
from quartet.wire.errors import InvalidArgument
from services.reference.config import ReferenceConfig

if TYPE_CHECKING:
    from services.reference.model import Frozen

MOST_ENDS = 512
"""Most end tokens of one request; they are passed to the model with every pair."""


@serve.deployment(
    name="Reference",
    max_ongoing_requests=MOST_ONGOING,
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=10,
)
class Reference(HealthMixin):
    """One replica, one frozen model."""

    def __init__(self, config: ReferenceConfig, load: "Callable[..., Frozen] | None" = None) -> None:
        """Loads the model. `load` takes the place of `FrozenModel`, for a model that is emulated."""
        # Imported here because Serve builds the application in a process that then need not load torch.
        from quartet.models.device import default_device, gpu_count
        from quartet.models.distribution import Distribution
        from quartet.models.loading import load_tokenizer
        from quartet.wire.identity import describe_model, vocabulary_size
        from services.reference.model import FrozenModel, Question, answers

        prepare_replica()
        frozen = (load or FrozenModel)(config, default_device(), gpu_count())
        tokenizer = load_tokenizer(config.model)
        self._question = Question
        self._tokens = vocabulary_size(tokenizer)
        self._distribution = partial(Distribution, vocabulary=self._tokens)
        self._admission = Admission(config.limits)
        self._batcher: Batcher[Question, Floats] = Batcher(
            partial(answers, frozen),
            batch_tokens=config.batch_tokens,
            batch_s=config.limits.batch_s,
        )
        self._model = describe_model(
            config.model,
            tokenizer,
            vocab_size=frozen.vocab_size,
            max_length=frozen.max_length,
            dtype=config.dtype,
        )
        self._check = frozen.check

    async def check_health(self) -> None:
        """Raises if the model does not work: one that computes has a deadline, an idle one is tested."""
        await self._batcher.check_health(self._check)

    @translated
    async def Logprobs(self, request: pb.LogprobsRequest, share: Share) -> pb.LogprobsResponse:
        """Computes log-probs of response tokens under the frozen model."""
        temperature = request.temperature if request.HasField("temperature") else 1.0
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InvalidArgument(f"temperature: {temperature:g}; must be more than 0")
        asked = self._asked(request, temperature)
        data, model = request.trajectories, self._model
        with self._admission.admitted(share, *Columns.measure(data, "trajectories"), "trajectories"):
            trajectories = Columns.received(data, {}, vocab_size=model.vocab_size, max_length=model.max_length)
            call = TokenCall(trajectories, lambda trajectory: self._question(trajectory, asked))
            await self._batcher.submit(share, call)
        return pb.LogprobsResponse(ref_logprobs=pack_floats(call.out))

    def _asked(self, request: pb.LogprobsRequest, temperature: float) -> Any:
        """The Distribution that the request asks for."""
        if request.min_new_tokens < 0:
            raise InvalidArgument(f"min_new_tokens: {request.min_new_tokens}; must be 0 or more")
        if len(request.end_ids) > MOST_ENDS:
            raise InvalidArgument(f"end_ids: {len(request.end_ids)} of them; may be {MOST_ENDS} at most")
        last = self._model.vocab_size - 1
        for token in request.end_ids:
            if not 0 <= token <= last:
                raise InvalidArgument(f"end_ids: {token} is outside the vocabulary (0 to {last})")
        ends = tuple(sorted(set(request.end_ids)))
        if request.min_new_tokens and sum(token < self._tokens for token in ends) == self._tokens:
            raise InvalidArgument(f"end_ids: all {self._tokens} tokens; before min_new_tokens one must be left")
        return self._distribution(temperature=temperature, min_new_tokens=request.min_new_tokens, end_ids=ends)

    @translated
    async def Info(self, request: common_pb2.InfoRequest) -> pb.ReferenceInfo:
        """Describes the model."""
        return pb.ReferenceInfo(model=self._model)


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args:` of the YAML file."""
    return Reference.bind(ReferenceConfig.parse(args, "reference.args"))  # type: ignore[attr-defined, no-any-return]
