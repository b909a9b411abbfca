"""Makes scorers from their configuration, and one of several."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protos import reward_pb2 as pb
from quartet.wire.codec import Floats
from services.reward.config import FunctionScorerConfig, ModelScorerConfig, ScorerConfig, SeveralScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import Scored, Scorer


class SeveralScorers:
    """Several scorers as one, whose scores are those of all of them."""

    def __init__(self, config: SeveralScorerConfig, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = tuple(scorers.values())
        self.names = config.names
        self.max_length = min(scorer.max_length for scorer in self._scorers)
        self.batch_tokens = min(scorer.batch_tokens for scorer in self._scorers)
        self.texts = any(scorer.texts for scorer in self._scorers)
        sizes = [scorer.vocab_size for scorer in self._scorers if scorer.vocab_size is not None]
        self.vocab_size = min(sizes) if sizes else None
        parts = [scorer.identity for scorer in self._scorers]
        digest = hashlib.sha256(b"".join(part.SerializeToString(deterministic=True) for part in parts))
        self.identity = pb.ScorerIdentity(
            name="several", model_hash=digest.hexdigest(), names=self.names, parts=parts
        )

    def score(self, pairs: Sequence[Scored]) -> Floats:
        """The scores of each pair by all scorers, [B, K]."""
        return np.concatenate([scorer.score(pairs) for scorer in self._scorers], axis=1)

    def check(self) -> None:
        """Checks each of them."""
        for scorer in self._scorers:
            scorer.check()


def make_scorer(config: ScorerConfig, tokenizer: Any, device: torch.device) -> Scorer:
    """The scorer that the configuration describes. ConfigError if it cannot be made."""
    if isinstance(config, ModelScorerConfig):
        return ModelScorer(config, tokenizer, device)
    if isinstance(config, FunctionScorerConfig):
        return FunctionScorer(config)
    made = {name: make_scorer(each, tokenizer, device) for name, each in config.scorers.items()}
    return SeveralScorers(config, made)
