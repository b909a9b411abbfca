"""Makes scorers from their configuration."""

from typing import Any

import torch

from services.reward.config import (
    BlendScorerConfig,
    FunctionScorerConfig,
    ModelScorerConfig,
    ScorerConfig,
)
from services.reward.scorers.blend import BlendScorer
from services.reward.scorers.function import FunctionScorer
from services.reward.scorers.model import ModelScorer
from services.reward.scorers.scorer import Scorer


def make_scorer(config: ScorerConfig, tokenizer: Any, device: torch.device) -> Scorer:
    """The scorer that the configuration describes. ConfigError if it cannot be made."""
    if isinstance(config, ModelScorerConfig):
        return ModelScorer(config, tokenizer, device)
    if isinstance(config, FunctionScorerConfig):
        return FunctionScorer(config)
    assert isinstance(config, BlendScorerConfig)
    return BlendScorer([(part.weight, make_scorer(part.scorer, tokenizer, device)) for part in config.parts])
