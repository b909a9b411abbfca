"""The four replicas without Serve, models and engines around them: what they do by themselves with a request."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from protos import common_pb2, reward_pb2
from services.common.config.limits import LimitsConfig
from services.common.serving.admission import Admission
from services.common.serving.batcher import Batcher
from services.common.serving.slots import EngineSlots
from services.common.wire.callers import Purpose, declared
from services.critic.config import CriticConfig
from services.critic.replica import Critic
from services.reference.replica import Reference
from services.reward.encoding import Encoder, Received
from services.reward.replica import Reward
from services.rollout.config import RolloutConfig
from services.rollout.replica import Rollout
from services.rollout.sample import FinishReason, Sample

VOCABULARY = 64
LONGEST = 1 << 17
BATCH_TOKENS = 16_384


class Context:
    """A servicer context of a caller that trains."""

    def __init__(self, run: str = "run", purpose: Purpose = Purpose.TRAINING) -> None:
        self._metadata = declared(run, purpose)

    def set_code(self, code: Any) -> None:
        """Ignores the status."""

    def set_details(self, details: str) -> None:
        """Ignores the details."""

    def invocation_metadata(self) -> Any:
        """The caller's declared run and purpose."""
        return self._metadata


@cache
def tokenizer() -> Any:
    """Words w4 to w63, and four special tokens."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(4, VOCABULARY))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>")


def reward(run: Any = None, limits: LimitsConfig | None = None, batch_tokens: int = BATCH_TOKENS) -> Any:
    """A reward replica whose scorer is a function; None: zeros."""
    made, limits = _bare(Reward), limits or LimitsConfig()
    made._admission, made._received = Admission(limits), Received
    made._batcher = Batcher(run or _zeros, batch_tokens=batch_tokens, batch_s=limits.batch_s)
    made._encoder = Encoder(tokenizer(), VOCABULARY, LONGEST)
    made._scorer = reward_pb2.ScorerIdentity()
    return made


def reference() -> Any:
    """A reference replica whose log-probs are zeros."""
    made, limits = _bare(Reference), LimitsConfig()
    made._admission, made._question, made._distribution = Admission(limits), _pair, _no_distribution
    made._batcher = Batcher(_zeros_by_token, batch_tokens=BATCH_TOKENS, batch_s=limits.batch_s)
    made._model = common_pb2.ModelInfo(vocab_size=VOCABULARY, max_length=LONGEST)
    return made


class _Critic:
    """A critic that knows nothing."""

    last_step = 0

    def __init__(self) -> None:
        self.turn = asyncio.Lock()

    def stop(self) -> None:
        """Nothing runs."""

    def expect(self, *_: Any) -> int:
        """Any state will do."""
        return self.last_step

    async def values(self, pairs: Sequence[Any]) -> Any:
        """Zeros."""
        return _zeros_by_token(pairs)

    async def train(self, *_: Any, **__: Any) -> dict[str, float]:
        """Nothing."""
        return {}


def critic() -> Any:
    """A critic replica whose values are zeros and whose training does nothing."""
    made = _bare(Critic)
    limits, train = (CriticConfig.model_fields[name].default for name in ("limits", "train_limits"))
    made._admission, made._train_admission = Admission(limits), Admission(train)
    made._critic = _Critic()
    made._batcher = Batcher(
        made._critic.values, batch_tokens=BATCH_TOKENS, batch_s=limits.batch_s, turn=made._critic.turn
    )
    made._model = common_pb2.ModelInfo(vocab_size=VOCABULARY, max_length=LONGEST)
    return made


class _Engine:
    """Answers every prompt with one token at once."""

    version = 0
    vocab_size, max_length = VOCABULARY, LONGEST

    def shutdown(self) -> None:
        """Nothing runs."""

    async def generate(self, index: int, prompt_ids: Any, sampling: Any, seed: int | None, *rest: Any) -> Sample:
        """Token 0."""
        prompt_ids.tolist()
        await asyncio.sleep(0)
        return Sample(index, np.zeros(1, np.int32), np.zeros(1, np.float32), FinishReason.LENGTH, ((0, 0, 1),))


def rollout() -> Any:
    """A rollout replica whose engine takes no time."""
    made, limits = _bare(Rollout), RolloutConfig.model_fields["limits"].default
    made._engine, made._replica = _Engine(), "replica"
    made._admission, made._slots = Admission(limits), EngineSlots(256, limits, quantum=2048)
    return made


def _bare(deployment: Any) -> Any:
    return object.__new__(deployment.func_or_class)


def _pair(prompt: Any, response: Any, asked: Any) -> Any:
    return prompt, response


def _no_distribution(**_: Any) -> None:
    return None


def _zeros(items: Sequence[Any]) -> Any:
    return np.zeros(len(items), np.float32)


def _zeros_by_token(items: Sequence[Any]) -> Any:
    return [np.zeros(len(response), np.float32) for _, response in items]
