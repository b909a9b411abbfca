"""Tokens of a batch that the policy does not train on: loss and gradient token by token, with plain classes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import KLConfig
from quartet.learner.minibatches import minibatches
from tests.learner_batches import PolicyBatch, logprob_rows, train_policy
from tests.plain import language_model
from tests.unit.naive import PROMPTS, RESPONSES, chosen, distributions
from tests.unit.policy_batches import TEMPERATURE, make_trainer, weights

MARKS = [[False, True], [False, True, False, True], [False], [True, True, False]]
"""Five tokens of ten are trained on; of the third response none."""


def masked(batch: PolicyBatch, marks: list[list[bool]] = MARKS, *, whole: bool = False) -> PolicyBatch:
    """The batch with numbers at the tokens left out that would spoil every sum; `whole` leaves them their log-probs
    of learner and engine, as the ratio of a whole response is of all its tokens."""
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    trained = [np.asarray(row) for row in marks]

    def spoilt(rows: Any) -> list[np.ndarray]:
        return [np.where(mark, row, np.float32(-11)) for mark, row in zip(trained, rows, strict=True)]

    return replace(
        batch,
        trained=trained,
        logprobs=batch.logprobs if whole else spoilt(batch.logprobs),
        old_logprobs=batch.old_logprobs if whole else spoilt(batch.old_logprobs),
        ref_logprobs=spoilt(batch.ref_logprobs),
        advantages=spoilt(batch.advantages),
    )


def losses(model: Any, batch: PolicyBatch, rows: Any, **of: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss and the entropy over the marked tokens of these rows, one token after the other."""
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    assert batch.trained is not None
    every = distributions(model, TEMPERATURE)
    new = chosen(every)
    total, entropy, count = torch.zeros(()), torch.zeros(()), 0
    for row in rows:
        kept = [t for t, mark in enumerate(batch.trained[row]) if mark]
        k = (batch.old_logprobs[row] - batch.logprobs[row]).tolist()
        product = min(float(np.exp(sum(k))), 2.0)
        for t in kept:
            ratio, advantage = (
                (new[row][t] - float(batch.old_logprobs[row][t])).exp(),
                float(batch.advantages[row][t]),
            )
            weight = product if of.get("correction") == "tis-sequence" else min(float(np.exp(k[t])), 2.0)
            total = total - weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + batch.kl_coef * (new[row][t] - float(batch.ref_logprobs[row][t])) ** 2 / 2
            entropy = entropy - (every[row][t].exp() * every[row][t]).sum()
            count += 1
    return (total - of.get("entropy_coef", 0) * entropy) / count, entropy / count


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
@pytest.mark.parametrize("more", [{"entropy_coef": 0.2}, {"correction": "tis-sequence"}], ids=str)
def test_loss_and_gradient_are_those_of_the_marked_tokens(
    policy_folder: Path, batch: PolicyBatch, micro_batch_tokens: int, more: dict[str, Any]
) -> None:
    given, model = masked(batch, whole="correction" in more), language_model(policy_folder)
    expected, entropy = losses(model, given, range(4), **more)
    wanted = torch.cat([g.view(-1) for g in torch.autograd.grad(expected, list(model.parameters()))])
    kl = KLConfig(placement="loss", estimator="k2")
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens, kl=kl, **more)
    before = weights(trainer)
    metrics = train_policy(trainer, given, seed=0)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    if "entropy_coef" in more:
        assert metrics["entropy"] == pytest.approx(float(entropy.detach()), abs=1e-5)
    assert "empty_steps" not in metrics
    torch.testing.assert_close(before - weights(trainer), wanted, atol=1e-5, rtol=1e-3)


def test_minibatches_without_a_marked_token_are_left_out(policy_folder: Path, batch: PolicyBatch) -> None:
    """Single responses in an order of their own; one of four has no token to train on."""
    kl, given, rate = KLConfig(placement="loss", estimator="k2"), masked(batch), 1e-5
    trainer = make_trainer(policy_folder, size=1, rate=rate, kl=kl)
    metrics = train_policy(trainer, given, seed=0)
    assert (metrics["empty_steps"], metrics["skipped_steps"]) == (1, 0)
    rows = [row for (row,) in minibatches(4, epochs=1, size=1, seed=0) if any(MARKS[row])]
    assert len(rows) == 3
    # So small are the steps that each minibatch meets the first weights; it counts by its tokens.
    wanted = [float(losses(language_model(policy_folder), given, [row])[0].detach()) for row in rows]
    tokens = [sum(MARKS[row]) for row in rows]
    assert metrics["loss"] == pytest.approx(np.average(wanted, weights=tokens), abs=1e-3)


def test_a_batch_without_a_marked_token_changes_nothing(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder, size=2, epochs=2)
    before = weights(trainer)
    metrics = train_policy(trainer, masked(batch, [[False] * len(row) for row in MARKS]), seed=0)
    assert metrics == {"skipped_steps": 0, "skipped_in_a_row": 0, "empty_steps": 4}
    assert torch.equal(weights(trainer), before)
    assert "empty_steps" not in train_policy(trainer, batch, seed=0)


def test_all_tokens_marked_is_as_none_told(policy_folder: Path, batch: PolicyBatch) -> None:
    every = [np.ones(len(response), np.bool_) for response in RESPONSES]
    plain, marked = (make_trainer(policy_folder, size=3, rate=0.1) for _ in range(2))
    assert train_policy(plain, batch, seed=0) == train_policy(marked, replace(batch, trained=every), seed=0)
    assert torch.equal(weights(plain), weights(marked))


def test_one_step_computes_the_old_logprobs_of_all_tokens(policy_folder: Path, batch: PolicyBatch) -> None:
    """Tokens that are left out have theirs too, for they may be asked for."""
    kl = KLConfig(placement="loss", estimator="k2")
    trainer = make_trainer(policy_folder, micro_batch_tokens=12, rate=0.1, kl=kl)
    before = logprob_rows(trainer, batch.prompts, batch.responses)
    metrics = train_policy(trainer, replace(masked(batch), old_logprobs=None), seed=0)
    assert metrics["first_log_ratio_max"] == 0
    for row, expected in zip(trainer.trained_logprobs(), before, strict=True):
        assert row.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(PROMPTS) == len(before)
