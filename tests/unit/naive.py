"""The numbers that the services compute in padded batches, one sequence at a time by Hugging Face's own classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

PROMPTS = [[1, 5, 6, 7], [1, 8], [9], [1, 10, 11]]
RESPONSES = [[12, 2], [13, 0, 14, 0], [0], [15, 16, 2]]
TOKENS = 10
"""Response tokens in all."""


def arrays(rows: Sequence[Sequence[float]], dtype: Any = np.int32) -> list[Any]:
    return [np.asarray(row, dtype) for row in rows]


def distributions(model: Any, temperature: float) -> list[torch.Tensor]:
    """Log-probs of every token at each place of the response; [T, V] for each pair."""
    actual = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        actual.append((logits / temperature).log_softmax(-1))
    return actual


def chosen(distributions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs of the response's tokens; [T] for each pair."""
    pairs = zip(distributions, RESPONSES, strict=True)
    return [logprobs[range(len(response)), response] for logprobs, response in pairs]
