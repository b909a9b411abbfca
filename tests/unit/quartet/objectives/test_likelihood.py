"""Supervised fine-tuning, which is an objective in a file and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.columns import Columns
from quartet.config.learner import LearnerConfig, OptimizerConfig
from quartet.learner.learner import RankLearner
from quartet.learner.trainer import Schedule, Trainer
from quartet.models.loading import load_causal
from quartet.objectives.likelihood import Likelihood
from tests.plain import language_model

# Answers, which are marked, stand also in the midst of a conversation.
IDS = [[1, 5, 6, 12, 2], [1, 8, 13, 2, 9, 14, 15, 2], [1, 10, 2], [1, 11, 20, 21, 22, 7, 2]]
ANSWERS = [[3, 4], [2, 3, 5, 6, 7], [2], [3, 4, 6]]
TOKENS = 11


def conversations() -> Columns:
    marks = [np.isin(np.arange(len(ids)), answer) for ids, answer in zip(IDS, ANSWERS, strict=True)]
    ids, lengths = np.concatenate(IDS).astype(np.int32), np.asarray([len(row) for row in IDS], np.int32)
    return Columns.of(ids, lengths, np.concatenate(marks))


def make_trainer(folder: Path, rate: float = 1e-3, **options: Any) -> Trainer:
    config = LearnerConfig(model=str(folder), optimizer=OptimizerConfig(learning_rate=rate), **options)
    model = load_causal(config.model, config.dtype, config.attn_implementation, packing=config.packing)
    return Trainer(RankLearner(model, config))


def losses(folder: Path) -> tuple[list[torch.Tensor], list[torch.nn.Parameter]]:
    """The negative log-likelihood of each conversation's answers by transformers' own labels, and the parameters."""
    model = language_model(folder)
    labels = [
        [token if t in answer else -100 for t, token in enumerate(ids)]
        for ids, answer in zip(IDS, ANSWERS, strict=True)
    ]
    each = zip(IDS, labels, ANSWERS, strict=True)
    rows = [model(torch.tensor([ids]), labels=torch.tensor([own])).loss * len(answer) for ids, own, answer in each]
    return rows, list(model.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_tokens": 8}, {"packing": True}, {"packing": True, "micro_batch_tokens": 12}]
)
def test_loss_and_gradient_are_those_of_transformers_labels(policy_folder: Path, options: dict[str, Any]) -> None:
    rows, parameters = losses(policy_folder)
    expected = torch.stack(rows).sum() / TOKENS
    gradient = torch.cat([g.view(-1) for g in torch.autograd.grad(expected, parameters)])
    metrics = make_trainer(policy_folder, **options).train(conversations(), Likelihood(), Schedule(1, 4, 0))
    assert metrics["loss"] == metrics["nll"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_each_conversation_may_count_alike(policy_folder: Path) -> None:
    rows, _ = losses(policy_folder)
    means = [float(row.detach()) / len(answer) for row, answer in zip(rows, ANSWERS, strict=True)]
    objective = Likelihood(reduction="trajectories")
    metrics = make_trainer(policy_folder, micro_batch_tokens=8).train(conversations(), objective, Schedule(1, 4, 0))
    assert metrics["loss"] == pytest.approx(np.mean(means), abs=1e-5)
    assert metrics["nll"] == pytest.approx(sum(float(row.detach()) for row in rows) / TOKENS, abs=1e-5)


def test_answers_that_are_not_trained_on_change_nothing(policy_folder: Path) -> None:
    rows, _ = losses(policy_folder)
    trained = np.repeat([True, False, True, False], [len(answer) for answer in ANSWERS])
    batch = conversations().with_sampled(trained=trained)
    metrics = make_trainer(policy_folder).train(batch, Likelihood(), Schedule(1, 4, 0))
    assert metrics["loss"] == pytest.approx(float((rows[0] + rows[2]).detach()) / 3, abs=1e-5)


def test_a_model_learns_its_answers(policy_folder: Path) -> None:
    trainer, batch = make_trainer(policy_folder, rate=1e-2), conversations()
    first, *_, last = [trainer.train(batch, Likelihood(), Schedule(2, 2, step))["nll"] for step in range(30)]
    assert last < 0.05 * first
    model: Any = trainer.learner.module
    for ids, answer in zip(IDS, ANSWERS, strict=True):
        best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert [best[t - 1] for t in answer] == [ids[t] for t in answer]
