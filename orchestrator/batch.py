"""From experience to what policy and critic train on: rewards, advantages, returns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orchestrator.config import PPOConfig
from orchestrator.experience import Experience
from orchestrator.ppo import (
    AdaptiveKL,
    FixedKL,
    RunningNormaliser,
    gae,
    kl_estimate,
    mismatch,
    shape_rewards,
    whiten,
)
from services.common.arrays import Floats
from services.common.numerics import explained_variance, response_mask
from services.common.sequences import pad_rows

KLController = FixedKL | AdaptiveKL


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the update needs beside the experience; lists of B arrays [T]."""

    advantages: list[Floats]
    returns: list[Floats]
    kl: float
    """Mean over responses of the KL estimate summed over tokens, in nats."""
    normaliser: RunningNormaliser
    """The one given, having seen this batch's scores."""
    metrics: dict[str, float]


def make_controller(ppo: PPOConfig, coef: float) -> KLController:
    """What steers the KL coefficient, which is `coef` now."""
    if ppo.kl.target is None:
        return FixedKL(ppo.kl.coef)
    return AdaptiveKL(coef, ppo.kl.target, ppo.kl.horizon)


def estimate_advantages(
    experiences: Sequence[Experience],
    old_logprobs: Sequence[Floats],
    ppo: PPOConfig,
    kl_coef: float,
    normaliser: RunningNormaliser,
) -> Advantages:
    """Scores and KL into rewards, rewards and values into advantages and returns.

    Args:
        experiences: B responses.
        old_logprobs: B times [T], the learner's before the update. The KL is measured with these, so that a
            mismatch of the rollout engine does not count as distance from the reference.
        ppo: the algorithm.
        kl_coef: coefficient of this batch.
        normaliser: of the scores so far.
    """
    lengths = torch.tensor([len(e.sample.response_ids) for e in experiences])
    width = int(lengths.max())
    mask = response_mask(lengths, width)
    old = pad_rows(old_logprobs, width)
    sampled = pad_rows([e.sample.logprobs for e in experiences], width)
    reference = pad_rows([e.ref_logprobs for e in experiences], width)
    values = pad_rows([e.values for e in experiences], width)
    raw_scores = torch.tensor([e.score for e in experiences])

    kl = kl_estimate(old, reference, ppo.kl.estimator, mask)
    scores = raw_scores
    if ppo.normalise_scores:
        normaliser = normaliser.update(raw_scores)
        scores = normaliser.normalise(raw_scores)
    in_reward = kl_coef if ppo.kl.placement == "reward" else 0.0
    rewards = shape_rewards(scores.float(), kl, mask, kl_coef=in_reward, clip=ppo.score_clip)
    advantages, returns = gae(rewards, values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
    whitened = whiten(advantages, mask) if ppo.whiten_advantages else advantages

    kl_per_response = float(torch.where(mask, kl, 0).sum(1).mean())
    metrics = {
        "score/mean": float(raw_scores.mean()),
        "score/std": float(raw_scores.std(correction=0)),
        "reward/mean": float(rewards.sum(1).mean()),
        "kl/reference": kl_per_response,
        "kl/coef": kl_coef,
        "value/explained_variance": explained_variance(values, returns, mask),
        "response/length_mean": float(lengths.float().mean()),
        "response/length_max": float(width),
        "response/truncated": sum(e.truncated for e in experiences) / len(experiences),
    }
    wrong = mismatch(sampled, old, mask, cap=ppo.importance_cap)
    metrics |= {f"mismatch/{name}": value for name, value in wrong.items()}
    return Advantages(_rows(whitened, lengths), _rows(returns, lengths), kl_per_response, normaliser, metrics)


def _rows(values: torch.Tensor, lengths: torch.Tensor) -> list[Floats]:
    return [row[:length].numpy() for row, length in zip(values, lengths.tolist(), strict=True)]
