"""What can score a pair: a model, a Python function, or a blend of them."""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig

from protos import reward_pb2 as pb
from services.common.arrays import Floats, Ints
from services.common.config import ConfigError
from services.common.functions import load_function
from services.common.identity import model_hash, tokenizer_hash
from services.common.models import load_scalar, load_tokenizer, max_length
from services.common.pairs import Pair
from services.common.residence import Residence
from services.common.sequences import length_batches, pad_pairs
from services.reward.config import (
    BlendScorerConfig,
    FunctionScorerConfig,
    ModelScorerConfig,
    ScorerConfig,
)


@dataclass(frozen=True, slots=True)
class Scored:
    """One pair, as ids for models and as text for functions."""

    prompt_ids: Ints
    response_ids: Ints
    pair: Pair


class Scorer(Protocol):
    """Scores pairs. `identity` says what it is; `max_length` how many tokens it takes."""

    identity: pb.ScorerIdentity
    max_length: int

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """[B] float32, one score per pair."""

    def check(self) -> None:
        """Raises when the scorer cannot score; for health checks."""


class ModelScorer:
    """The scalar that a sequence-classification model gives at the response's last token."""

    def __init__(self, config: ModelScorerConfig, tokenizer: Any, device: torch.device) -> None:
        if tokenizer_hash(load_tokenizer(config.model)) != tokenizer_hash(tokenizer):
            raise ConfigError(
                f"reward.args.scorer.model: the tokenizer of {config.model} is not the service's tokenizer, "
                "so its token ids mean something else"
            )
        labels = AutoConfig.from_pretrained(config.model).num_labels
        if labels != 1:
            raise ConfigError(f"reward.args.scorer.model: {config.model} has num_labels {labels}; it must have 1")
        self._model = load_scalar(config.model, config.dtype).eval().requires_grad_(False)
        self._residence = Residence(self._model, device, config.idle_s)
        extra = self._model.config
        self._mean = float(getattr(extra, "reward_mean", 0.0)) if config.normalise else 0.0
        self._std = float(getattr(extra, "reward_std", 1.0)) if config.normalise else 1.0
        self._batch_tokens = config.batch_tokens
        self._device = device
        self.max_length = max_length(self._model)
        self.identity = pb.ScorerIdentity(
            name=f"model:{config.model}", model_hash=model_hash(config.model), weight=1.0
        )

    @torch.inference_mode()
    def score(self, pairs: Sequence[Scored]) -> Floats:
        """[B] normalised scores."""
        prompts = [scored.prompt_ids for scored in pairs]
        responses = [scored.response_ids for scored in pairs]
        scores = np.empty(len(pairs), np.float32)
        with self._residence.use():
            for batch in length_batches(prompts, responses, self._batch_tokens):
                padded = pad_pairs([prompts[i] for i in batch], [responses[i] for i in batch], self._device)
                scores[batch] = self._model.scores(padded).cpu().numpy()
        normalised: Floats = (scores - self._mean) / self._std
        return normalised

    def check(self) -> None:
        """See Scorer: a forward pass over one pair, but with offload the weights stay where they are."""
        if self._residence.offloads:
            return self._residence.check()
        one = np.zeros(1, np.int32)
        self.score([Scored(one, one, Pair("", ""))])


class FunctionScorer:
    """Whatever a Python function makes of the texts."""

    def __init__(self, config: FunctionScorerConfig) -> None:
        self._function = load_function(config.function)
        self._name = config.function
        self.max_length = 1 << 30
        try:
            source = inspect.getsource(inspect.getmodule(self._function) or self._function)
        except (OSError, TypeError):
            raise ConfigError(
                f"reward.args.scorer.function: {config.function} has no Python source to identify it by"
            ) from None
        self.identity = pb.ScorerIdentity(
            name=f"function:{config.function}",
            model_hash=hashlib.sha256(source.encode()).hexdigest(),
            weight=1.0,
        )

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """[B]; RuntimeError naming the function if it does not give one finite number per pair."""
        scores = self._function([scored.pair for scored in pairs])
        if len(scores) != len(pairs):
            raise RuntimeError(f"{self._name} gave {len(scores)} scores for {len(pairs)} pairs")
        with np.errstate(over="ignore"):
            values = np.asarray(scores, np.float32)
        if not np.isfinite(values).all():
            raise RuntimeError(f"{self._name} gave a score that is not finite in float32")
        return values

    def check(self) -> None:
        """See Scorer: nothing, since a function may rightly refuse a pair that was made up."""


class BlendScorer:
    """The weighted sum of other scorers."""

    def __init__(self, parts: Sequence[tuple[float, Scorer]]) -> None:
        self._parts = parts
        self.max_length = min(scorer.max_length for _, scorer in parts)
        self.identity = pb.ScorerIdentity(name="blend", weight=1.0)
        for weight, scorer in parts:
            part = self.identity.parts.add()
            part.CopyFrom(scorer.identity)
            part.weight = weight
        digest = hashlib.sha256(b"".join(part.SerializeToString() for part in self.identity.parts))
        self.identity.model_hash = digest.hexdigest()

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """[B]."""
        total = np.zeros(len(pairs), np.float32)
        for weight, scorer in self._parts:
            total += np.float32(weight) * scorer.score(pairs)
        return total

    def check(self) -> None:
        """See Scorer: every part's."""
        for _, scorer in self._parts:
            scorer.check()


def make_scorer(config: ScorerConfig, tokenizer: Any, device: torch.device) -> Scorer:
    """The scorer that the configuration describes. ConfigError if it cannot be made."""
    if isinstance(config, ModelScorerConfig):
        return ModelScorer(config, tokenizer, device)
    if isinstance(config, FunctionScorerConfig):
        return FunctionScorer(config)
    assert isinstance(config, BlendScorerConfig)
    return BlendScorer([(part.weight, make_scorer(part.scorer, tokenizer, device)) for part in config.parts])
