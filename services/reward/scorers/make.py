"""Makes scorers from their configuration, and sums of several."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from protos import reward_pb2 as pb
from quartet.wire.codec import Floats
from services.reward.config import (
    BlendScorerConfig,
    FunctionScorerConfig,
    ModelScorerConfig,
    ScorerConfig,
)
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import Scored, Scorer


class BlendScorer:
    """The weighted sum of other scorers."""

    def __init__(self, parts: Sequence[tuple[float, Scorer]]) -> None:
        self._parts = parts
        self.max_length = min(scorer.max_length for _, scorer in parts)
        self.batch_tokens = min(scorer.batch_tokens for _, scorer in parts)
        self.texts = any(scorer.texts for _, scorer in parts)
        sizes = [scorer.vocab_size for _, scorer in parts if scorer.vocab_size is not None]
        self.vocab_size = min(sizes) if sizes else None
        self.identity = pb.ScorerIdentity(name="blend", weight=1.0)
        for weight, scorer in parts:
            part = self.identity.parts.add()
            part.CopyFrom(scorer.identity)
            part.weight = weight
        digest = hashlib.sha256(b"".join(part.SerializeToString() for part in self.identity.parts))
        self.identity.model_hash = digest.hexdigest()

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """The weighted sums, [B]."""
        total = np.zeros(len(pairs), np.float32)
        for weight, scorer in self._parts:
            total += np.float32(weight) * scorer.score(pairs)
        return total

    def check(self) -> None:
        """Checks every part."""
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
