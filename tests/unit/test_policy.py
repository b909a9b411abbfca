"""The policy learner's log-probs, loss and training against straightforward computations."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from orchestrator.config import KLConfig, PPOConfig
from orchestrator.policy import PolicyBatch, PolicyTrainer
from services.common.learner_config import OptimizerConfig, PolicyConfig
from services.common.models import load_tokenizer
from services.common.weight_transfer.manifest import Manifest
from tests.models import EOS, make_policy, make_tokenizer
from tests.unit.naive import PROMPTS, RESPONSES, TOKENS, arrays, chosen, distributions, language_model

TEMPERATURE = 0.7
Rows = list[list[float]]


def make_trainer(
    folder: Path, *, micro_batch_tokens: int = 10_000, rate: float = 1.0, epochs: int = 1, size: int = 4, **ppo: Any
) -> PolicyTrainer:
    """AdamW whose epsilon dwarfs the gradient: its first step is `rate` times the gradient."""
    optimizer = OptimizerConfig(learning_rate=rate * 1e5, eps=1e5, max_grad_norm=1e9)
    config = PolicyConfig(model=str(folder), optimizer=optimizer, micro_batch_tokens=micro_batch_tokens)
    return PolicyTrainer(config, PPOConfig(epochs=epochs, minibatch_size=size, **ppo), TEMPERATURE)


def noisy(rows: Sequence[torch.Tensor], scale: float, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [row.detach() + scale * torch.randn(row.shape, generator=draw) for row in rows]


@pytest.fixture
def batch(policy_folder: Path) -> PolicyBatch:
    """Log-probs that differ from the policy's by chance, and random advantages."""
    now = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    old = noisy(now, 0.3, 1)
    rows = {
        "old_logprobs": old,
        "logprobs": noisy(old, 0.5, 2),
        "ref_logprobs": noisy(now, 0.5, 3),
        "advantages": noisy([torch.zeros_like(row) for row in now], 1.0, 4),
    }
    fields = {name: [row.numpy() for row in values] for name, values in rows.items()}
    return PolicyBatch(prompts=arrays(PROMPTS), responses=arrays(RESPONSES), kl_coef=0.3, **fields)  # type: ignore[arg-type]


def weights(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([tensor.detach().view(-1) for _, tensor in trainer._learner.full_weights()])


@pytest.mark.parametrize("micro_batch_tokens", [1, 12, 1000])
def test_logprobs_equal_those_of_single_sequences(policy_folder: Path, micro_batch_tokens: int) -> None:
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens)
    found = trainer.logprobs(arrays(PROMPTS), arrays(RESPONSES))
    with torch.no_grad():
        expected = chosen(distributions(language_model(policy_folder), TEMPERATURE))
    assert [row.dtype for row in found] == [np.float32] * 4
    for row, wanted in zip(found, expected, strict=True):
        assert row.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def loss_by_hand(model: Any, batch: PolicyBatch, entropy_coef: float, kl: str | None) -> torch.Tensor:
    """PPO's loss over the whole batch: clip 0.2, importance weights capped at 2, over all ten tokens."""
    logprobs = distributions(model, TEMPERATURE)
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
    ({"kl": KLConfig(placement="reward", estimator="k2")}, 0.0, None),
]


@pytest.mark.parametrize(("ppo", "entropy_coef", "kl"), CASES)
@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
def test_loss_and_gradient_equal_those_by_hand(
    policy_folder: Path,
    batch: PolicyBatch,
    ppo: dict[str, Any],
    entropy_coef: float,
    kl: str | None,
    micro_batch_tokens: int,
) -> None:
    model = language_model(policy_folder)
    expected = loss_by_hand(model, batch, entropy_coef, kl)
    wanted = torch.cat([gradient.view(-1) for gradient in torch.autograd.grad(expected, list(model.parameters()))])
    trainer = make_trainer(policy_folder, micro_batch_tokens=micro_batch_tokens, **ppo)
    before = weights(trainer)
    metrics = trainer.train(batch, seed=0)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-4)
    torch.testing.assert_close(before - weights(trainer), wanted, atol=1e-5, rtol=1e-3)


def test_entropy_is_measured_without_a_bonus_and_raised_by_one(policy_folder: Path, batch: PolicyBatch) -> None:
    with torch.no_grad():
        every = distributions(language_model(policy_folder), TEMPERATURE)
    entropy = -sum(float((row.exp() * row).sum()) for row in every) / TOKENS
    quiet = replace(batch, advantages=[np.zeros_like(row) for row in batch.advantages])
    without, with_bonus = (make_trainer(policy_folder, rate=0.1, entropy_coef=coef) for coef in (0.0, 0.5))
    # What a step measures, it measures before its update.
    assert [without.train(quiet, seed=0)["entropy"] for _ in range(2)] == pytest.approx([entropy] * 2, abs=1e-5)
    measured = [with_bonus.train(quiet, seed=0)["entropy"] for _ in range(2)]
    assert measured[0] == pytest.approx(entropy, abs=1e-5)
    assert measured[1] > entropy + 0.02


def test_training_makes_good_tokens_likelier_and_bad_ones_less(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder, rate=0.1)
    before = trainer.logprobs(batch.prompts, batch.responses)
    signs = [1.0, 1.0, -1.0, -1.0]
    rows = {
        "logprobs": before,
        "old_logprobs": before,
        "ref_logprobs": before,
        "advantages": [np.full_like(row, sign) for row, sign in zip(before, signs, strict=True)],
    }
    metrics = trainer.train(PolicyBatch(batch.prompts, batch.responses, kl_coef=0, **rows), seed=0)  # type: ignore[arg-type]
    after = trainer.logprobs(batch.prompts, batch.responses)
    for sign, old, new in zip(signs, before, after, strict=True):
        assert sign * float((new - old).sum()) > 0
    assert metrics["learning_rate"] == 1e4
    assert {"loss", "entropy", "grad_norm", "approx_kl", "clip_fraction_low", "ratio_max"} <= metrics.keys()
    assert metrics["grad_norm"] > 0


def test_the_first_step_of_a_batch_is_on_policy(policy_folder: Path, batch: PolicyBatch) -> None:
    trainer = make_trainer(policy_folder)
    old = trainer.logprobs(batch.prompts, batch.responses)
    metrics = trainer.train(replace(batch, old_logprobs=old), seed=0)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0


def test_epochs_minibatches_and_the_seed_of_their_order(policy_folder: Path, batch: PolicyBatch) -> None:
    # The parts of minibatches add up; four steps are two epochs of two minibatches.
    options: dict[str, Any] = {"epochs": 2, "size": 2, "rate": 0.05}
    trainers = [make_trainer(policy_folder, micro_batch_tokens=tokens, **options) for tokens in (1000, 1, 1000)]
    measured = [trainer.train(batch, seed=seed) for trainer, seed in zip(trainers, (1, 1, 2), strict=True)]
    whole, parts, other = (weights(trainer) for trainer in trainers)
    assert float((parts - whole).abs().max()) < 1e-5
    assert measured[1] == pytest.approx(measured[0], abs=1e-4)
    assert float((other - whole).abs().max()) > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_sent_under_their_names_as_they_are_now(tmp_path: Path, tied: bool, batch: PolicyBatch) -> None:
    trainer = make_trainer(make_policy(tmp_path / "policy", kind="llama", tied=tied))
    assert trainer.rendezvous("gloo", host="127.0.0.1", bucket_bytes=1 << 20, stall_s=5) > 0
    manifest = Manifest.unpack(trainer.join(1, 1))
    assert manifest.names == tuple(name for name, _ in language_model(tmp_path / "policy").named_parameters())
    assert ("lm_head.weight" in manifest.names) is not tied
    assert set(manifest.dtypes) == {"float32"}

    def send(push: int) -> dict[int, bytes]:
        trainer.gather(push)
        return trainer.send(push)

    first = send(1)
    assert send(2) == first
    assert [len(found) for found in first.values()] == [16] * len(first)
    trainer.train(batch, seed=0)
    # Until they are gathered again, what was sent last is what newcomers get.
    assert trainer.send(2) == first
    assert send(3) != first


def test_a_saved_policy_loads_with_all_that_belongs_to_it(
    policy_folder: Path, tmp_path: Path, batch: PolicyBatch
) -> None:
    trainer = make_trainer(policy_folder)
    trainer.train(batch, seed=0)
    saved = trainer.save(str(tmp_path / "saved"))
    assert saved == str(tmp_path / "saved")
    again = make_trainer(Path(saved))
    assert torch.equal(weights(again), weights(trainer))
    assert load_tokenizer(saved).get_vocab() == make_tokenizer().get_vocab()
    assert GenerationConfig.from_pretrained(saved).eos_token_id == EOS
