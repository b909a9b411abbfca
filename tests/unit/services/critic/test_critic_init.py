"""`benchmarks.critic_init` in small: a critic on the reward model's body is ahead from its first step on."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.critic_init import measure
from recipes.common.shape import Shape
from recipes.reviews.make import make
from recipes.reviews.settings import Settings

# A measurement: what it is made of has tests of its own.
pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

SMALL = Settings(
    shape=Shape(hidden=64, layers=1, heads=2),
    supervised_steps=150,
    supervised_batch=32,
    supervised_rate=5e-3,
    preferences=1500,
    reward_batch=32,
    reward_rate=3e-3,
    measured=64,
)


def test_the_reward_model_is_the_best_start_and_the_policy_no_better_than_chance(tmp_path: Path) -> None:
    """The policy's body predicts scores no better than random weights, here and with the demo's models alike."""
    models = tmp_path / "models"
    assert make(models, SMALL, Console(file=io.StringIO()))
    actual = measure(models, seed=0, steps=2)
    reward, policy, random = (actual[name] for name in ("reward model", "policy", "random"))
    # A new head explains nothing, whatever it sits on.
    assert max(abs(values[0]) for values in (reward, policy, random)) < 0.1
    # Found: 0.18 against 0.01 and 0.04.
    assert reward[2] > 0.1
    assert reward[2] > 2 * max(policy[2], random[2])
    assert policy[2] < random[2] + 0.05
