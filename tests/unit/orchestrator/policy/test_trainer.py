"""The policy learner's log-probs, loss and training against straightforward computations."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from orchestrator.algorithms.contract import BANDED, KLConfig
from quartet.learner.reductions import Reduction
from quartet.models import distribution as modelled
from quartet.models import head, tiles
from quartet.models.numerics import shannon
from quartet.models.tiles import linear_logprobs
from tests.learner_batches import PolicyBatch, logprob_rows, train_policy
from tests.plain import language_model
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS, arrays, chosen, distributions
from tests.unit.policy_batches import TEMPERATURE, make_trainer, weights

Rows = list[list[float]]


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
def test_logprobs_equal_those_of_single_sequences(policy_folder: Path, micro_batch_tokens: int) -> None:
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens)
    actual = logprob_rows(trainer, arrays(PROMPTS), arrays(RESPONSES))
    with torch.no_grad():
        expected = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    assert [row.dtype for row in actual] == [np.float32] * 4
    for row, wanted in zip(actual, expected, strict=True):
        assert row.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def loss_by_hand(
    model: Any, batch: PolicyBatch, entropy_coef: float, kl: str | None, reduction: Reduction = "tokens"
) -> torch.Tensor:
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
        of_row = -((old - sampled).exp().clamp(max=2) * objective).sum()
        of_row = of_row + entropy_coef * (every.exp() * every).sum()
        if kl == "k2":
            of_row = of_row + batch.kl_coef * ((new - ref) ** 2 / 2).sum()
        if kl == "k3":
            of_row = of_row + batch.kl_coef * ((ref - new).exp() - 1 - (ref - new)).sum()
        denominators = {"tokens": TOKENS, "trajectories": len(new) * len(batch.responses)}
        total = total + of_row / denominators.get(str(reduction), len(batch.responses) * int_of(reduction))
    return total


def int_of(reduction: Reduction) -> int:
    return reduction if isinstance(reduction, int) else 1


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


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
@pytest.mark.parametrize("reduction", ["trajectories", 3])
def test_every_term_of_the_loss_has_the_reduction(
    policy_folder: Path, batch: PolicyBatch, reduction: Reduction, micro_batch_tokens: int
) -> None:
    """Metrics are means over tokens whatever the reduction."""
    model = language_model(policy_folder)
    expected = loss_by_hand(model, batch, 0.2, "k3", reduction)
    wanted = torch.cat([gradient.view(-1) for gradient in torch.autograd.grad(expected, list(model.parameters()))])
    given: dict[str, Any] = {"entropy_coef": 0.2, "kl": KLConfig(placement="loss", estimator="k3")}
    trainer, plain = (
        make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens, reduction=each, **given)
        for each in (reduction, "tokens")
    )
    before = weights(trainer)
    metrics, others = train_policy(trainer, batch, seed=0), train_policy(plain, batch, seed=0)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    torch.testing.assert_close(before - weights(trainer), wanted, atol=1e-5, rtol=1e-3)
    assert float((weights(trainer) - weights(plain)).abs().max()) > 1e-3
    for name in metrics.keys() - {"loss", "grad_norm"}:
        assert metrics[name] == pytest.approx(others[name]), name


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("clip", ["ppo", "dis"])
@pytest.mark.parametrize("reduction", ["trajectories", 3])
def test_a_reduction_is_the_same_however_a_batch_is_cut(
    policy_folder: Path, batch: PolicyBatch, reduction: Reduction, clip: str, packing: bool
) -> None:
    """With a response of which no token is trained on, and one that is trained on in part."""
    trained = [np.ones(len(row), bool) for row in batch.responses]
    trained[0][:] = False
    trained[-1][0] = False
    marked = replace(batch, trained=trained)
    moved = []
    for tokens in (1, 12, 1000):
        trainer = make_trainer(
            policy_folder, micro_batch_tokens=tokens, reduction=reduction, clip=clip, packing=packing
        )
        before = weights(trainer)
        train_policy(trainer, marked, seed=0)
        moved.append(before - weights(trainer))
    assert float(moved[0].abs().max()) > 1e-3
    for each in moved[1:]:
        torch.testing.assert_close(each, moved[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
@pytest.mark.parametrize("correction", ["tis-sequence", "icepop", "geometric", "decoupled", "dis"])
def test_every_correction_trains_alike_however_a_batch_is_cut(
    policy_folder: Path, batch: PolicyBatch, correction: str, micro_batch_tokens: int
) -> None:
    """The loss by hand, response by response."""
    assert batch.old_logprobs is not None
    band = (0.8, 1.25)
    expected = 0.0
    with torch.no_grad():
        now = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    for row, new in enumerate(now):
        old, engine, advantages = (
            torch.from_numpy(values[row]) for values in (batch.old_logprobs, batch.logprobs, batch.advantages)
        )
        k, r = (old - engine).exp(), (new - engine).exp()
        inside, within = (k >= 0.8) & (k <= 1.25), 0.8 <= float((old - engine).mean().exp()) <= 1.25
        weight = {
            "tis-sequence": k.prod().clamp(max=2).expand_as(k),
            "icepop": torch.where(inside, k, 0.0),
            "geometric": torch.full_like(k, float(within)),
            "decoupled": torch.where(k <= 2, k, 0.0),
        }
        if correction == "dis":
            expected -= float((((r >= 0.8) & (r <= 1.25)) * r * advantages).sum())
        else:
            ratio = (new - old).exp()
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            expected -= float((weight[correction] * objective).sum())
    given: dict[str, Any] = {"clip" if correction == "dis" else "correction": correction}
    if correction in (*BANDED, "dis"):
        given["importance_band"] = band
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens, **given)
    assert train_policy(trainer, batch, seed=0)["loss"] == pytest.approx(expected / TOKENS, abs=1e-5)


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


def test_training_makes_good_tokens_likelier_and_bad_ones_less(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder, rate=0.1)
    before = logprob_rows(trainer, batch.prompts, batch.responses)
    signs = [1.0, 1.0, -1.0, -1.0]
    rows = {
        "logprobs": before,
        "old_logprobs": before,
        "ref_logprobs": before,
        "advantages": [np.full_like(row, sign) for row, sign in zip(before, signs, strict=True)],
    }
    metrics = train_policy(trainer, PolicyBatch(batch.prompts, batch.responses, kl_coef=0, **rows), seed=0)  # type: ignore[arg-type]
    after = logprob_rows(trainer, batch.prompts, batch.responses)
    for sign, old, new in zip(signs, before, after, strict=True):
        assert sign * float((new - old).sum()) > 0
    assert metrics["learning_rate"] == 1e4
    assert {"loss", "sampled_entropy", "grad_norm", "approx_kl", "clip_fraction_low", "ratio_max"} <= metrics.keys()
    assert metrics["grad_norm"] > 0


def test_the_first_step_of_a_batch_is_on_policy(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder)
    old = logprob_rows(trainer, batch.prompts, batch.responses)
    metrics = train_policy(trainer, replace(batch, old_logprobs=old), seed=0)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
