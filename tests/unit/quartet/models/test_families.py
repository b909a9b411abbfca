"""Published architectures in miniature, without an engine: packing, LoRA, saving, reward models, critics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from orchestrator.algorithms.ppo import PPO
from orchestrator.policy.trainer import PolicyTrainer
from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig, OptimizerConfig, PolicyConfig
from quartet.models.distribution import Distribution
from quartet.models.loading import load_tokenizer
from quartet.models.scalar import load_scalar, scores_of
from quartet.models.sequences import concatenate_pairs, pad_pairs
from services.critic.config import CriticConfig
from services.critic.trainer import CriticTrainer
from tests import plain
from tests.families import FAMILIES
from tests.learner_batches import CriticBatch, PolicyBatch, logprob_rows, train_critic, train_policy, value_rows

PROMPTS, RESPONSES = plain.random_pairs(6, seed=4, longest=20)
ALWAYS = ("gpt2", "gemma2", "qwen3-moe")
NAMES = [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.exhaustive) for n in FAMILIES]
OPTIMIZER = OptimizerConfig(learning_rate=3e-3)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    return FAMILIES[name].make(tmp_path / "model")


def refusal(name: str) -> str:
    """A pattern of the error that refuses to pack a model of this family."""
    return rf"^packing: \S+ \({FAMILIES[name].kind}\) has layers without plain causal attention; set packing to"


def make_trainer(folder: Path, **options: Any) -> PolicyTrainer:
    config = PolicyConfig(model=str(folder), optimizer=OPTIMIZER, **options)
    return PolicyTrainer(config, PPO(epochs=1, minibatch_size=6), Distribution())


def train(trainer: PolicyTrainer) -> dict[str, float]:
    old = logprob_rows(trainer, PROMPTS, RESPONSES)
    advantages = [np.linspace(-1, 1, len(row), dtype=np.float32) for row in old]
    return train_policy(trainer, PolicyBatch(PROMPTS, RESPONSES, old, old, old, advantages, 0.0), seed=0)


def test_what_is_trained_and_saved_is_what_transformers_loads(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    assert plain.furthest(logprob_rows(trainer, PROMPTS, RESPONSES), _plain(folder)) < 1e-4
    assert train(trainer)["first_log_ratio_max"] < 1e-4
    saved = tmp_path / "saved"
    trainer.learner.save(saved)
    now = logprob_rows(trainer, PROMPTS, RESPONSES)
    assert plain.furthest(now, _plain(saved)) < 1e-4
    assert plain.furthest(now, _plain(folder)) > 1e-2
    assert load_tokenizer(str(saved)).get_vocab() == load_tokenizer(str(folder)).get_vocab()


def test_packed_sequences_give_what_padded_ones_give_or_are_refused(folder: Path, name: str) -> None:
    if not FAMILIES[name].packs:
        with pytest.raises(ConfigError, match=refusal(name)):
            make_trainer(folder, packing=True)
        return
    padded, packed = make_trainer(folder), make_trainer(folder, packing=True)
    assert train(packed) == pytest.approx(train(padded), abs=1e-4)
    assert plain.furthest(logprob_rows(padded, PROMPTS, RESPONSES), logprob_rows(packed, PROMPTS, RESPONSES)) < 1e-3


def test_adapters_are_trained_and_merged(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, lora=LoraConfig(rank=4))
    before = logprob_rows(trainer, PROMPTS, RESPONSES)
    assert plain.furthest(before, _plain(folder)) < 1e-4
    assert train(trainer)["first_log_ratio_max"] < 1e-4
    train(trainer)
    saved = tmp_path / "saved"
    trainer.learner.save(saved)
    now = logprob_rows(trainer, PROMPTS, RESPONSES)
    assert plain.furthest(now, _plain(saved)) < 1e-4
    assert plain.furthest(now, before) > 1e-4


def test_a_reward_model_scores_the_last_token(name: str, tmp_path: Path) -> None:
    reward = FAMILIES[name].make_reward(tmp_path / "reward")
    model = load_scalar(str(reward), "float32").eval()
    whole: Any = AutoModelForSequenceClassification.from_pretrained(reward, attn_implementation="eager").eval()
    body = getattr(whole, whole.base_model_prefix)
    with torch.no_grad():
        actual = scores_of(model, pad_pairs(PROMPTS, RESPONSES)).tolist()
        rows = [torch.tensor([[*p, *r]]) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        expected = [float(whole.score(body(row).last_hidden_state[0, -1])) for row in rows]
    assert actual == pytest.approx(expected, abs=1e-4)
    if not FAMILIES[name].packs:
        with pytest.raises(ConfigError, match=refusal(name)):
            load_scalar(str(reward), "float32", packing=True)
        return
    packed = load_scalar(str(reward), "float32", packing=True).eval()
    with torch.no_grad():
        assert scores_of(packed, concatenate_pairs(PROMPTS, RESPONSES)).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_critic_values_and_learns(folder: Path, tmp_path: Path) -> None:
    trainer = CriticTrainer(CriticConfig(model=str(folder), optimizer=OPTIMIZER))
    values = value_rows(trainer, PROMPTS, RESPONSES)
    returns = [row + 1 for row in values]
    batch = CriticBatch(PROMPTS, RESPONSES, values, returns)
    losses = [train_critic(trainer, batch, epochs=1, minibatch_size=6, seed=0)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    saved = tmp_path / "critic"
    trainer.learner.save(saved)
    now = value_rows(trainer, PROMPTS, RESPONSES)
    assert plain.furthest(now, plain.values(saved, PROMPTS, RESPONSES)) < 1e-4
    assert plain.furthest(now, values) > 1e-2
    again = CriticTrainer(CriticConfig(model=str(saved), optimizer=OPTIMIZER))
    assert plain.furthest(value_rows(again, PROMPTS, RESPONSES), now) < 1e-4


def _plain(folder: Path) -> Any:
    return plain.logprobs(plain.language_model(folder), PROMPTS, RESPONSES)
