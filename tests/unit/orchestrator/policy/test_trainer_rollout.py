"""Trains with the rollout engine's log-probs as the old ones (algorithm.old_logprobs: rollout)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import KLConfig
from quartet.learner.minibatches import minibatches
from tests.learner_batches import PolicyBatch, logprob_rows, train_policy
from tests.unit.naive import RESPONSES
from tests.unit.policy_batches import make_trainer, weights


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
def test_the_ratio_is_to_the_engines_logprobs(
    policy_folder: Path, batch: PolicyBatch, micro_batch_tokens: int
) -> None:
    """The same steps as with a learner whose own log-probs are the engine's to the last bit."""
    options: dict[str, Any] = {"epochs": 2, "size": 2, "rate": 0.05, "micro_batch_tokens": micro_batch_tokens}
    learner = make_trainer(policy_folder, **options)
    rollout, without = (make_trainer(policy_folder, old_logprobs="rollout", **options) for _ in range(2))
    expected = train_policy(learner, replace(batch, old_logprobs=batch.logprobs), seed=3)
    assert expected["ratio_max"] > 1.1  # the batch's log-probs are not the learner's
    assert train_policy(rollout, batch, seed=3) == expected
    assert train_policy(without, replace(batch, old_logprobs=None), seed=3) == expected
    assert torch.equal(weights(rollout), weights(learner))
    assert torch.equal(weights(without), weights(learner))


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
def test_the_first_step_measures_the_learners_own(
    policy_folder: Path, batch: PolicyBatch, micro_batch_tokens: int
) -> None:
    """The log-probs of the first minibatch before the update, and none of the other."""
    trainer = make_trainer(
        policy_folder, old_logprobs="rollout", epochs=2, size=3, rate=5.0, micro_batch_tokens=micro_batch_tokens
    )
    before = logprob_rows(trainer, batch.prompts, batch.responses)
    metrics = train_policy(trainer, replace(batch, old_logprobs=None), seed=0)
    measured = trainer.trained_logprobs()
    first = next(minibatches(4, epochs=2, size=3, seed=0))
    assert [len(row) for row in measured] == [len(RESPONSES[i]) if i in first else 0 for i in range(4)]
    for row in first:
        assert measured[row].tolist() == pytest.approx(before[row].tolist(), abs=1e-5)
    largest = max(float(abs(before[row] - batch.logprobs[row]).max()) for row in first)
    assert metrics["first_log_ratio_max"] == pytest.approx(largest, abs=1e-5)


def test_the_first_minibatch_with_tokens_to_train_on_measures(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder, old_logprobs="rollout", size=2)
    before = logprob_rows(trainer, batch.prompts, batch.responses)
    left_out, second = minibatches(4, epochs=1, size=2, seed=0)
    marks = [np.full(len(row), index not in left_out) for index, row in enumerate(RESPONSES)]
    train_policy(trainer, replace(batch, old_logprobs=None, trained=marks), seed=0)
    measured = trainer.trained_logprobs()
    assert {index for index, row in enumerate(measured) if len(row)} == set(second)
    for row in second:
        assert measured[row].tolist() == pytest.approx(before[row].tolist(), abs=1e-5)


def test_a_first_step_that_is_skipped_measures_too(policy_folder: Path, batch: PolicyBatch) -> None:
    """No weight has moved before its forward pass, nor before that of the step after it."""
    trainer = make_trainer(policy_folder, old_logprobs="rollout", size=2, rate=5.0)
    before = logprob_rows(trainer, batch.prompts, batch.responses)
    skipped, second = minibatches(4, epochs=1, size=2, seed=0)
    advantages = [row * (np.nan if index in skipped else 1) for index, row in enumerate(batch.advantages)]
    metrics = train_policy(trainer, replace(batch, old_logprobs=None, advantages=advantages), seed=0)
    assert metrics["skipped_steps"] == 1
    measured = trainer.trained_logprobs()
    assert {index for index, row in enumerate(measured) if len(row)} == set(skipped)
    for row in skipped:
        assert measured[row].tolist() == pytest.approx(before[row].tolist(), abs=1e-5)
    largest = max(float(abs(before[row] - batch.logprobs[row]).max()) for row in second)
    assert metrics["first_log_ratio_max"] == pytest.approx(largest, abs=1e-5)


def test_a_penalty_in_the_rewards_needs_no_logprobs_of_the_learner(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder, old_logprobs="rollout", kl=KLConfig(coef=0.1), epochs=2, size=3)
    assert train_policy(trainer, replace(batch, old_logprobs=None), seed=0)["skipped_steps"] == 0
