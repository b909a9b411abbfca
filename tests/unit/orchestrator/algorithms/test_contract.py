"""Needs of an update, by its configuration."""

from typing import Any

import pytest

from orchestrator.algorithms.registry import parse as parse_algorithm


@pytest.mark.parametrize(
    ("algorithm", "needed"),
    [
        ({"kl": {"coef": 0}}, False),
        ({"kl": {"placement": "loss", "estimator": "k3"}}, False),
        ({}, True),
        ({"kl": {"coef": 0}, "epochs": 2}, True),
        ({"kl": {"coef": 0}, "minibatch_size": 7}, True),
        ({"kl": {"coef": 0}, "minibatch_size": 9}, False),
        ({"epochs": 2, "minibatch_size": 7, "old_logprobs": "rollout"}, False),
    ],
)
def test_logprobs_are_needed_before_an_update_of_several_steps_or_for_a_penalty(
    algorithm: dict[str, Any], needed: bool
) -> None:
    """A batch has 8 samples here."""
    assert parse_algorithm({"epochs": 1, "minibatch_size": 8} | algorithm).needs_old_logprobs(8) is needed
