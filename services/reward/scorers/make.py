"""Makes scorers from their configuration, and one of several."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from protos import reward_pb2 as pb
from quartet.serving.batcher import SpoiltError
from quartet.wire.codec import Floats
from quartet.wire.outcomes import Unscored
from services.reward.config import FunctionScorerConfig, ModelScorerConfig, ScorerConfig, SeveralScorerConfig
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import Result, Scored, Scorer


class SeveralScorers:
    """Several scorers as one, whose scores are those of all of them."""

    def __init__(self, config: SeveralScorerConfig, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = scorers
        self.names = config.names
        self.max_length = min(scorer.max_length for scorer in scorers.values())
        self.batch_tokens = min(scorer.batch_tokens for scorer in scorers.values())
        self.texts = any(scorer.texts for scorer in scorers.values())
        sizes = [scorer.vocab_size for scorer in scorers.values() if scorer.vocab_size is not None]
        self.vocab_size = min(sizes) if sizes else None
        parts = [scorer.identity for scorer in scorers.values()]
        named = pb.ScorerIdentity(names=self.names, parts=parts).SerializeToString(deterministic=True)
        digest = hashlib.sha256(named)
        self.identity = pb.ScorerIdentity(
            name="several", model_hash=digest.hexdigest(), names=self.names, parts=parts
        )

    def score(self, pairs: Sequence[Scored]) -> list[Result]:
        """The scores of each pair by all scorers; a pair that one of them does not score is not scored. Raises as
        they do."""
        by_scorer = list[Sequence[Result]]()
        for name, scorer in self._scorers.items():
            try:
                by_scorer.append(scorer.score(pairs))
            except SpoiltError as error:
                raise SpoiltError(_of(name, error.result)) from None
        return [self._joined(each) for each in zip(*by_scorer, strict=True)]

    def _joined(self, results: Sequence[Result]) -> Result:
        scores = list[Floats]()
        for name, result in zip(self._scorers, results, strict=True):
            if isinstance(result, Unscored):
                return _of(name, result)
            scores.append(result)
        return np.concatenate(scores)

    def check(self) -> None:
        """Checks each of them."""
        for scorer in self._scorers.values():
            scorer.check()


def _of(name: str, unscored: Unscored) -> Unscored:
    """The same, by the scorer of this name."""
    return replace(unscored, reason=f"{name}: {unscored.reason}")


def make_scorer(config: ScorerConfig, tokenizer: Any, device: torch.device) -> Scorer:
    """The scorer that the configuration describes. ConfigError if it cannot be made."""
    if isinstance(config, ModelScorerConfig):
        return ModelScorer(config, tokenizer, device)
    if isinstance(config, FunctionScorerConfig):
        return FunctionScorer(config)
    made = {name: make_scorer(each, tokenizer, device) for name, each in config.scorers.items()}
    return SeveralScorers(config, made)
