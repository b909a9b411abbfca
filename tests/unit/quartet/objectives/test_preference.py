"""A reward model from preferences, which is an objective in a file and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from quartet.columns import Columns
from quartet.config.learner import LearnerConfig, OptimizerConfig
from quartet.learner.learner import RankLearner
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.scalar import load_scalar
from quartet.objectives.preference import Preference

PROMPTS = [[1, 5, 6], [1, 8], [1, 9, 10, 11]]
CHOSEN = [[12, 2], [13, 14, 15, 16, 2], [17, 2]]
REJECTED = [[18, 19, 20, 21, 2], [2], [22, 23, 2]]


def comparisons() -> Columns:
    pairs = zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    sides = [(np.asarray(p, np.int32), np.asarray(answer, np.int32)) for p, *both in pairs for answer in both]
    return Columns.of_pairs([prompt for prompt, _ in sides], [answer for _, answer in sides])


def make_trainer(folder: Path, rate: float = 1e-3, **options: Any) -> Trainer:
    config = LearnerConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=rate), **options)
    return Trainer(RankLearner(load_scalar(config.model, config.dtype, packing=config.packing), config))


def scores(folder: Path) -> tuple[torch.Tensor, Any]:
    """[3, 2], the scores of chosen and rejected by transformers' own class, one sequence at a time; and its model."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        [model(torch.tensor([prompt + answer])).logits[0, 0] for answer in both]
        for prompt, *both in zip(PROMPTS, CHOSEN, REJECTED, strict=True)
    ]
    return torch.stack([torch.stack(row) for row in rows]), model


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_tokens": 1}, {"packing": True}, {"packing": True, "micro_batch_tokens": 20}]
)
def test_loss_and_gradient_are_those_of_bradley_and_terry(reward_folder: Path, options: dict[str, Any]) -> None:
    by_hand, model = scores(reward_folder)
    expected = -(by_hand[:, 0] - by_hand[:, 1]).sigmoid().log().mean()
    gradient = torch.cat([g.view(-1) for g in torch.autograd.grad(expected, list(model.parameters()))])
    metrics = make_trainer(reward_folder, **options).train(comparisons(), Preference(), Schedule(1, 6, 0))
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(float((by_hand[:, 0] > by_hand[:, 1]).float().mean()))
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_a_reward_model_learns_what_is_preferred(reward_folder: Path) -> None:
    trainer = make_trainer(reward_folder, rate=3e-3)
    for step in range(20):
        metrics = trainer.train(comparisons(), Preference(), Schedule(2, 2, step))
    assert metrics["accuracy"] == 1
    assert metrics["loss"] < 0.05


def test_half_a_comparison_is_refused(reward_folder: Path) -> None:
    trainer = make_trainer(reward_folder)
    for batch, size in ((comparisons(), 3), (comparisons().take([0, 1, 2]), 2)):
        with pytest.raises(ValueError, match="groups of 2"):
            trainer.train(batch, Preference(), Schedule(1, size, 0))
