"""Trains on a batch, and saves or sends the trained weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from orchestrator.algorithms.contract import KLConfig
from quartet.models.loading import load_tokenizer
from quartet.weight_transfer.manifest import Manifest
from tests.learner_batches import PolicyBatch, logprob_rows, train_policy
from tests.models import EOS, make_policy, make_tokenizer
from tests.plain import language_model
from tests.unit.policy_batches import make_trainer, weights


def test_epochs_minibatches_and_the_seed_of_their_order(policy_folder: Path, batch: PolicyBatch) -> None:
    # The parts of minibatches add up; four steps are two epochs of two minibatches.
    options: dict[str, Any] = {"epochs": 2, "size": 2, "rate": 0.05}
    trainers = [make_trainer(policy_folder, micro_batch_tokens=tokens, **options) for tokens in (1000, 1, 1000)]
    measured = [train_policy(trainer, batch, seed=seed) for trainer, seed in zip(trainers, (1, 1, 2), strict=True)]
    whole, parts, other = (weights(trainer) for trainer in trainers)
    assert float((parts - whole).abs().max()) < 1e-5
    assert measured[1] == pytest.approx(measured[0], abs=1e-4)
    assert float((other - whole).abs().max()) > 1e-3


def test_the_first_steps_ratio_is_told_apart_and_the_largest_is_the_largest(
    policy_folder: Path, batch: PolicyBatch
) -> None:
    trainer = make_trainer(policy_folder, epochs=2, size=2, rate=5.0)
    old = logprob_rows(trainer, batch.prompts, batch.responses)
    metrics = train_policy(trainer, replace(batch, old_logprobs=old, logprobs=old), seed=0)
    assert metrics["first_log_ratio_max"] < 1e-5
    assert metrics["log_ratio_max"] > 1e-2
    assert metrics["ratio_max"] > metrics["ratio_mean"]


@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
def test_one_step_computes_the_old_logprobs_itself(
    policy_folder: Path, batch: PolicyBatch, micro_batch_tokens: int
) -> None:
    """Log-probs are those of a pass of its own but for rounding; training is as if the batch had brought them."""
    kl = KLConfig(placement="loss", estimator="k2")
    options: dict[str, Any] = {"micro_batch_tokens": micro_batch_tokens, "rate": 0.1, "kl": kl}
    trainer, again = (make_trainer(policy_folder, **options) for _ in range(2))
    before = logprob_rows(trainer, batch.prompts, batch.responses)
    metrics = train_policy(trainer, replace(batch, old_logprobs=None), seed=0)
    computed = trainer.trained_logprobs()
    assert metrics["first_log_ratio_max"] == 0
    assert metrics["ratio_max"] == 1
    for row, expected in zip(computed, before, strict=True):
        assert row.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert train_policy(again, replace(batch, old_logprobs=computed), seed=0) == metrics
    assert torch.equal(weights(again), weights(trainer))
    assert float((weights(trainer) - weights(make_trainer(policy_folder))).abs().max()) > 1e-3


@pytest.mark.parametrize("options", [{}, {"kl": KLConfig(coef=0), "epochs": 2}, {"kl": KLConfig(coef=0), "size": 3}])
def test_several_steps_or_a_penalty_need_old_logprobs(
    policy_folder: Path, batch: PolicyBatch, options: dict[str, Any]
) -> None:
    trainer = make_trainer(policy_folder, **options)
    with pytest.raises(ValueError, match="4 responses have no old_logprobs, and this update needs them"):
        train_policy(trainer, replace(batch, old_logprobs=None), seed=0)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_sent_under_their_names_as_they_are_now(tmp_path: Path, tied: bool, batch: PolicyBatch) -> None:
    trainer = make_trainer(make_policy(tmp_path / "policy", kind="llama", tied=tied))
    assert trainer.sending.rendezvous("gloo", host="127.0.0.1", bucket_bytes=1 << 20, stall_s=5)[1] > 0
    manifest = Manifest.unpack(trainer.sending.manifest(64))
    trainer.sending.join(1, 1)
    assert manifest.names == tuple(name for name, _ in language_model(tmp_path / "policy").named_parameters())
    assert ("lm_head.weight" in manifest.names) is not tied
    assert set(manifest.dtypes) == {"float32"}

    def send(push: int) -> dict[int, bytes]:
        trainer.sending.gather(push)
        return trainer.sending.send(push)

    first = send(1)
    assert send(2) == first
    assert [len(actual) for actual in first.values()] == [16] * len(first)
    train_policy(trainer, batch, seed=0)
    # Until they are gathered again, what was sent last is what newcomers get.
    assert trainer.sending.send(2) == first
    assert send(3) != first


def test_a_saved_policy_loads_with_all_that_belongs_to_it(
    policy_folder: Path, tmp_path: Path, batch: PolicyBatch
) -> None:
    trainer = make_trainer(policy_folder)
    train_policy(trainer, batch, seed=0)
    saved = tmp_path / "saved"
    trainer.learner.save(saved)
    again = make_trainer(saved)
    assert torch.equal(weights(again), weights(trainer))
    assert load_tokenizer(str(saved)).get_vocab() == make_tokenizer().get_vocab()
    assert GenerationConfig.from_pretrained(saved).eos_token_id == EOS
