"""The policy learner's log-probs, loss and training against straightforward computations."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import KLConfig
from quartet.models import distribution as modelled
from quartet.models import head, tiles
from quartet.models.numerics import shannon
from quartet.models.tiles import linear_logprobs
from tests.learner_batches import PolicyBatch, logprob_rows, train_policy
from tests.plain import language_model
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS, arrays, chosen, distributions
from tests.unit.policy_batches import TEMPERATURE, make_trainer, weights


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
def test_logprobs_equal_those_of_single_sequences(policy_folder: Path, micro_batch_tokens: int) -> None:
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens)
    actual = logprob_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))
    with torch.no_grad():
        expected = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    assert [row.dtype for row in actual] == [np.float32] * 4
    for row, wanted in zip(actual, expected, strict=True):
        assert row.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_sequences_are_scored_from_their_second_token_on_over_the_whole_vocabulary(policy_folder: Path) -> None:
    """At temperature 1, whatever the one that the run samples at."""
    trainer = make_trainer(policy_folder, micro_batch_tokens=12)
    rows = arrays([prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)])
    plain = language_model(policy_folder)
    for row, actual in zip(rows, trainer.score(rows), strict=True):
        with torch.no_grad():
            logprobs = plain(torch.from_numpy(row)[None].long()).logits[0, :-1].log_softmax(-1)
        assert actual.tolist() == pytest.approx(logprobs[range(len(row) - 1), row[1:]].tolist(), abs=1e-5)


def loss_by_hand(model: Any, batch: PolicyBatch, entropy_coef: float, kl: str | None) -> torch.Tensor:
    """PPO's loss over the whole batch: clip 0.2, importance weights capped at 2, over all ten tokens."""
    logprobs = distributions(model, TEMPERATURE)
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    total = torch.zeros(())
    for row, (every, new) in enumerate(zip(logprobs, chosen(logprobs), strict=True)):
        old, sampled, ref, advantages = (
            torch.from_numpy(values[row])
            for values in (batch.old_logprobs, batch.logprobs, batch.ref_logprobs, batch.advantages)
        )
        ratio = (new - old).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        total = total - ((old - sampled).exp().clamp(max=2) * objective).sum()
        total = total + entropy_coef * (every.exp() * every).sum()
        if kl == "k2":
            total = total + batch.kl_coef * ((new - ref) ** 2 / 2).sum()
        if kl == "k3":
            total = total + batch.kl_coef * ((ref - new).exp() - 1 - (ref - new)).sum()
    return total / TOKENS


CASES = [
    ({}, 0.0, None),
    ({"entropy_coef": 0.2}, 0.2, None),
    ({"kl": KLConfig(placement="loss", estimator="k2")}, 0.0, "k2"),
    ({"kl": KLConfig(placement="loss", estimator="k3")}, 0.0, "k3"),
    ({"kl": KLConfig(placement="reward", estimator="k1")}, 0.0, None),
]


@pytest.mark.parametrize(("algorithm", "entropy_coef", "kl"), CASES)
@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
def test_loss_and_gradient_equal_those_by_hand(
    policy_folder: Path,
    batch: PolicyBatch,
    algorithm: dict[str, Any],
    entropy_coef: float,
    kl: str | None,
    micro_batch_tokens: int,
) -> None:
    model = language_model(policy_folder)
    expected = loss_by_hand(model, batch, entropy_coef, kl)
    wanted = torch.cat([gradient.view(-1) for gradient in torch.autograd.grad(expected, list(model.parameters()))])
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens, **algorithm)
    before = weights(trainer)
    metrics = train_policy(trainer, batch, seed=0)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-4)
    torch.testing.assert_close(before - weights(trainer), wanted, atol=1e-5, rtol=1e-3)


def test_a_bonus_has_the_reduction_and_metrics_are_means_over_tokens(policy_folder: Path, batch: PolicyBatch) -> None:
    """Advantages of 0 leave the bonus alone."""
    model = language_model(policy_folder)
    every = distributions(model, TEMPERATURE)
    expected = sum((row.exp() * row).sum() / len(row) for row in every) * 0.2 / len(every)
    assert isinstance(expected, torch.Tensor)
    wanted = torch.cat([gradient.view(-1) for gradient in torch.autograd.grad(expected, list(model.parameters()))])
    quiet = replace(batch, advantages=[np.zeros_like(row) for row in batch.advantages])
    trainer, plain = (
        make_trainer(policy_folder, entropy_coef=0.2, reduction=each) for each in ("trajectories", "tokens")
    )
    before = weights(trainer)
    metrics, others = train_policy(trainer, quiet, seed=0), train_policy(plain, quiet, seed=0)
    torch.testing.assert_close(before - weights(trainer), wanted, atol=1e-5, rtol=1e-3)
    assert metrics["loss"] != pytest.approx(others["loss"], abs=1e-3)
    for name in metrics.keys() - {"loss", "grad_norm"}:
        assert metrics[name] == pytest.approx(others[name]), name


def test_dis_leaves_out_what_is_outside_the_band_of_the_settings(policy_folder: Path, batch: PolicyBatch) -> None:
    with torch.no_grad():
        now = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    expected = 0.0
    for row, new in enumerate(now):
        ratio = (new - torch.from_numpy(batch.logprobs[row])).exp()
        inside = (ratio >= 0.8) & (ratio <= 1.25)
        expected -= float((inside * ratio * torch.from_numpy(batch.advantages[row])).sum()) / TOKENS
    trainer = make_trainer(policy_folder, clip="dis", importance_band=(0.8, 1.25))
    assert train_policy(trainer, batch, seed=0)["loss"] == pytest.approx(expected, abs=1e-5)


def test_a_reference_that_weighs_nothing_need_not_be(policy_folder: Path, batch: PolicyBatch) -> None:
    actual = []
    for reference in (batch.ref_logprobs, None):
        trainer = make_trainer(policy_folder, kl=KLConfig(coef=0, placement="loss", estimator="k2"))
        metrics = train_policy(trainer, replace(batch, ref_logprobs=reference, kl_coef=0.0), seed=0)
        actual.append((metrics, weights(trainer).tolist()))
    assert actual[0] == actual[1]


def test_entropy_is_estimated_without_a_bonus_and_raised_by_one(policy_folder: Path, batch: PolicyBatch) -> None:
    with torch.no_grad():
        every = distributions(language_model(policy_folder), TEMPERATURE)
    entropy = -sum(float((row.exp() * row).sum()) for row in every) / TOKENS
    sampled = -sum(float(row.sum()) for row in chosen(every)) / TOKENS
    quiet = replace(batch, advantages=[np.zeros_like(row) for row in batch.advantages])
    without, with_bonus = (make_trainer(policy_folder, rate=0.1, entropy_coef=coef) for coef in (0.0, 0.5))
    # What a step measures, it measures before its update.
    measured = [train_policy(without, quiet, seed=0) for _ in range(2)]
    assert [each["sampled_entropy"] for each in measured] == pytest.approx([sampled] * 2, abs=1e-5)
    assert "entropy" not in measured[0]
    measured = [train_policy(with_bonus, quiet, seed=0) for _ in range(2)]
    assert measured[0]["sampled_entropy"] == pytest.approx(sampled, abs=1e-5)
    assert measured[0]["entropy"] == pytest.approx(entropy, abs=1e-5)
    assert measured[1]["entropy"] > entropy + 0.02


def test_the_whole_distribution_is_added_up_only_for_a_bonus(
    policy_folder: Path, batch: PolicyBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over the vocabulary costs, where the vocabulary is large."""
    counted = Mock(side_effect=shannon)
    monkeypatch.setattr(modelled, "shannon", counted)
    train_policy(make_trainer(policy_folder), batch, seed=0)
    assert counted.call_count == 0
    train_policy(make_trainer(policy_folder, entropy_coef=0.1), batch, seed=0)
    assert counted.call_count == 1
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", 1)
    counted = Mock(side_effect=linear_logprobs)
    monkeypatch.setattr(head, "linear_logprobs", counted)
    for coefficient in (0.0, 0.1):
        train_policy(make_trainer(policy_folder, entropy_coef=coefficient), batch, seed=0)
    assert [call.kwargs["entropy"] for call in counted.call_args_list] == [False, True]
