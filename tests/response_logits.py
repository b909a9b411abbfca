"""Logits of responses, the plain way to the log-probs that a model's head computes in tiles."""

from typing import Any

import torch

from quartet.models.sequences import PairTensors


def response_logits(model: Any, pairs: PairTensors) -> torch.Tensor:
    """[R, C, V]: for each column the logits that predict its response token."""
    logits: torch.Tensor = model(**pairs.inputs, logits_to_keep=pairs.predictors, use_cache=False).logits
    return logits
