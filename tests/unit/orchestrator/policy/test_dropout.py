"""Models that are published with dropout: the update computes what the old log-probs were computed with."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.learner import OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution
from quartet.models.loading import load_causal
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests import plain
from tests.families import FAMILIES
from tests.learner_batches import CriticBatch, PolicyBatch, logprob_rows, train_critic, train_policy, value_rows

DROPPING = ("gpt2", "opt", "gpt-neox", "phi3")
PROMPTS, RESPONSES = plain.random_pairs(8, seed=3, longest=20)


@pytest.fixture(scope="module", params=DROPPING)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param].make(tmp_path_factory.mktemp("dropout") / request.param)


def make_trainer(folder: Path, gradient_checkpointing: bool) -> PolicyTrainer:
    config = PolicyConfig(
        model=str(folder),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        gradient_checkpointing=gradient_checkpointing,
    )
    return PolicyTrainer(config, PPO(epochs=1, minibatch_size=8), Distribution(1.0))


def train(trainer: PolicyTrainer) -> dict[str, float]:
    old = logprob_rows(trainer, PROMPTS, RESPONSES)
    advantages = [np.linspace(-1, 1, len(row), dtype=np.float32) for row in old]
    return train_policy(trainer, PolicyBatch(PROMPTS, RESPONSES, old, old, old, advantages, 0.0), seed=0)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_first_ratio_is_one(folder: Path, gradient_checkpointing: bool) -> None:
    metrics = train(make_trainer(folder, gradient_checkpointing))
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["grad_norm"] > 0


def test_a_critic_is_trained_as_it_values(folder: Path) -> None:
    config = CriticConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=1e-4))
    trainer = CriticTrainer(config)
    values = value_rows(trainer, PROMPTS, RESPONSES)
    metrics = train_critic(
        trainer, CriticBatch(PROMPTS, RESPONSES, values, values), epochs=1, minibatch_size=8, seed=0
    )
    assert metrics["loss"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("gradient_checkpointing", "computed"), [(False, 2), (True, 3)])
def test_activations_are_recomputed_where_asked(folder: Path, gradient_checkpointing: bool, computed: int) -> None:
    """Layers in evaluation mode would keep them all, whatever is configured."""
    trainer = make_trainer(folder, gradient_checkpointing)
    layers = [m for m in trainer.learner.module.modules() if isinstance(m, GradientCheckpointingLayer)]
    calls: Counter[nn.Module] = Counter()
    parts = [next(layer.children()) for layer in layers]
    for part in parts:
        part.register_forward_pre_hook(lambda called, _: calls.update([called]))
    train(trainer)  # a pass for the old log-probs, and one with its gradient
    assert [calls[part] for part in parts] == [computed] * 2


def test_the_saved_configuration_keeps_its_dropout(folder: Path) -> None:
    config = load_causal(str(folder), "float32").config.to_dict()  # type: ignore[operator, union-attr]
    assert 0.1 in [rate for name, rate in config.items() if "drop" in name]
