"""Fixtures that make a policy trainer and batches for it."""

from pathlib import Path

import pytest
import torch

from tests.learner_batches import PolicyBatch
from tests.plain import language_model
from tests.unit.naive import PROMPTS, RESPONSES, arrays, chosen, distributions
from tests.unit.policy_batches import TEMPERATURE, noisy


@pytest.fixture
def batch(policy_folder: Path) -> PolicyBatch:
    """Log-probs that differ from the policy's by chance, and random advantages."""
    now = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    old = noisy(now, 0.3, 1)
    rows = {
        "old_logprobs": old,
        "logprobs": noisy(old, 0.5, 2),
        "ref_logprobs": noisy(now, 0.5, 3),
        "advantages": noisy([torch.zeros_like(row) for row in now], 1.0, 4),
    }
    fields = {name: [row.numpy() for row in values] for name, values in rows.items()}
    return PolicyBatch(prompts=arrays(PROMPTS), responses=arrays(RESPONSES), kl_coef=0.3, **fields)  # type: ignore[arg-type]
