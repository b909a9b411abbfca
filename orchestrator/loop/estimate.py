"""Estimates for the update of the learners from experience: rewards, advantages, returns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.algorithm.advantages import gae, length_lambdas, rewards_to_go, rloo, whiten
from orchestrator.algorithm.kl import AdaptiveKL, FixedKL, kl_estimate
from orchestrator.algorithm.loss import mismatch
from orchestrator.algorithm.off_policy import measures
from orchestrator.algorithm.rewards import RunningNormaliser, carry_back, shape_rewards
from orchestrator.config.algorithm import PPOConfig
from orchestrator.loop.batch import Batch
from quartet.models.numerics import explained_variance, masked_mean
from quartet.wire.codec import Floats

KLController = FixedKL | AdaptiveKL


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of the learner's policy before the update from the reference and from the samplers' policies."""

    kl: float | None
    """Mean over responses of the KL estimate summed over tokens, in nats; 0 without a reference, None if no token is
    trained on."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Inputs of the update besides the experience, by sampled token: [M]."""

    advantages: Floats
    returns: Floats | None
    """The returns that the critic learns; None without a critic."""
    normaliser: RunningNormaliser
    """The normaliser after this batch's scores."""
    metrics: dict[str, float]


def make_controller(ppo: PPOConfig, coef: float) -> KLController:
    """The controller of the KL coefficient, which is `coef` now."""
    if ppo.kl.target is None:
        return FixedKL(ppo.kl.coef)
    return AdaptiveKL(coef, ppo.kl.target, ppo.kl.horizon)


def old_logprobs_of(batch: Batch, ppo: PPOConfig) -> Tensor | None:
    """The log-probs from before the update, [B, T], the learner's or the engine's as configured; None where no reward
    needs the learner's and the update computes them itself."""
    if ppo.old_logprobs == "rollout":
        return batch.logprobs
    return batch.old_logprobs


def estimate_advantages(
    batch: Batch,
    old_logprobs: Tensor | None,
    ppo: PPOConfig,
    kl_coef: float,
    normaliser: RunningNormaliser,
) -> Advantages:
    """Computes rewards from scores and KL, and advantages and returns from rewards and, if there is a critic, values.

    Args:
        batch: B responses.
        old_logprobs: [B, T], from before the update: the learner's, so that the KL excludes the rollout engine's
            mismatch, or the engine's (ppo.old_logprobs); None if no reward holds a KL penalty.
        ppo: the algorithm.
        kl_coef: coefficient of this batch.
        normaliser: running mean and deviation of earlier scores.
    """
    scores, sampled = batch.scores, batch.sampled
    if ppo.normalise_scores:
        normaliser = normaliser.update(scores)
        scores = normaliser.normalise(scores)
    in_reward = kl_coef if ppo.kl.placement == "reward" else 0.0
    charged = in_reward > 0 and old_logprobs is not None
    kl = _kl(batch, old_logprobs, ppo, sampled) if charged else torch.zeros(sampled.shape)
    rewards = shape_rewards(scores.float(), kl, sampled, kl_coef=in_reward, clip=ppo.score_clip)
    advantages, returns = _advantages(batch, rewards, ppo)
    whitened = _whitened(advantages, batch.mask) if ppo.whiten_advantages else advantages

    metrics = {
        "reward/mean": float(rewards.sum(1).mean()),
        "kl/coef": kl_coef,
    }
    if returns is not None and batch.mask.any():
        metrics["value/explained_variance"] = explained_variance(batch.values, returns, batch.mask)
    learned = None if returns is None else batch.packed(returns)
    return Advantages(batch.packed(whitened), learned, normaliser, metrics | _described(batch))


def measure_distance(batch: Batch, own: Sequence[Floats], ppo: PPOConfig, version: int) -> Distance:
    """Measures `kl/reference`, `mismatch/*` and `off_policy/*` of B responses, by the tokens that are trained on;
    nothing if there is none. `mismatch/present_mean_abs` is that of the tokens which `version` itself sampled, if
    there are any.

    Args:
        batch: the responses.
        own: B arrays [t], the learner's log-probs before the update; [0] for responses of which they are not known.
            `mismatch/*` and `off_policy/*` are of the others alone.
        ppo: the algorithm.
        version: version of the learner's policy.
    """
    if not (trained := int(batch.mask.sum())):
        return Distance(None, {})
    own_logprobs = batch.padded(own)
    old_logprobs = batch.logprobs if ppo.old_logprobs == "rollout" else own_logprobs
    kl = float(_kl(batch, old_logprobs, ppo, batch.mask).sum(1).mean())
    kl *= int(batch.sampled.sum()) / trained  # of whole responses, also where tokens are left out
    metrics = {} if batch.ref_logprobs is None else {"kl/reference": kl}
    rows = torch.tensor([len(row) > 0 for row in own])[:, None]
    known = batch.mask & rows
    if known.any():
        metrics |= _off_policy(batch, own_logprobs, known, batch.sampled & rows, ppo)
    if (present := known & batch.sampled_since(version)).any():
        difference = (own_logprobs - batch.logprobs).abs()
        metrics["mismatch/present_mean_abs"] = float(masked_mean(difference, present))
    return Distance(kl, metrics)


def _kl(batch: Batch, old_logprobs: Tensor, ppo: PPOConfig, mask: Tensor) -> Tensor:
    """The KL estimate per token of the mask, [B, T]; zeros without a reference."""
    reference = batch.ref_logprobs
    if reference is None:
        return torch.zeros_like(old_logprobs)
    return kl_estimate(old_logprobs, reference, ppo.kl.estimator, mask)


def _advantages(batch: Batch, rewards: Tensor, ppo: PPOConfig) -> tuple[Tensor, Tensor | None]:
    """Advantages by the configured estimator, and the returns that a critic learns; None without one. Both [B, T],
    zero at tokens that are not trained on."""
    if ppo.advantages == "rloo":  # a response is one action, whose reward is that of all its tokens
        advantages = rloo(rewards, batch.sampled, group=ppo.samples_per_prompt)
        return torch.where(batch.mask, advantages, 0.0), None
    if batch.masked:
        rewards = carry_back(rewards, batch.sampled, batch.mask)
    if ppo.advantages == "reinforce++":
        return rewards_to_go(rewards, batch.mask, gamma=ppo.gamma), None
    return _gae(batch, rewards, ppo)


def _gae(batch: Batch, rewards: Tensor, ppo: PPOConfig) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [B, T]; each with a lambda of its own where one is configured (decoupled GAE: Yuan
    et al. 2025, VC-PPO, arXiv:2503.01491; SAO, arXiv:2607.07508)."""

    def estimated(gae_lambda: float | Tensor) -> tuple[Tensor, Tensor]:
        return gae(rewards, batch.values, batch.mask, gamma=ppo.gamma, gae_lambda=gae_lambda)

    alpha, of_critic = ppo.gae_lambda_alpha, ppo.critic_gae_lambda
    if alpha is None and of_critic is None:
        return estimated(ppo.gae_lambda)
    advantages, _ = estimated(ppo.gae_lambda if alpha is None else length_lambdas(batch.mask, alpha=alpha))
    _, returns = estimated(ppo.gae_lambda if of_critic is None else of_critic)
    return advantages, returns


def _whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Whitened advantages, [B, T]; a single token has no spread, so that its advantage is 0."""
    return whiten(advantages, mask) if int(mask.sum()) > 1 else torch.zeros_like(advantages)


def _described(batch: Batch) -> dict[str, float]:
    """Scores, lengths, and the share of masked tokens where there may be some."""
    masked = {} if batch.oldest_trained is None else {"staleness/masked": batch.masked}
    return masked | {
        "score/mean": float(batch.scores.mean()),
        "score/std": float(batch.scores.std(correction=0)),
        "response/length_mean": float(batch.lengths.float().mean()),
        "response/length_max": float(batch.mask.shape[1]),
        "response/truncated": batch.truncated,
    }


def _off_policy(
    batch: Batch, own_logprobs: Tensor, mask: Tensor, sampled: Tensor, ppo: PPOConfig
) -> dict[str, float]:
    """Measures of the distance between the samplers' policies and the learner's, and of its correction if there is
    one. All [B, T]."""
    cap, band = ppo.importance_cap, ppo.importance_band
    distance = mismatch(batch.logprobs, own_logprobs, mask, cap=cap)
    metrics = {f"mismatch/{name}": value for name, value in distance.items()}
    if not ppo.corrects:
        return metrics
    cost = measures(ppo.correction, own_logprobs, batch.logprobs, mask, sampled=sampled, cap=cap, band=band)
    return metrics | {f"off_policy/{name}": value for name, value in cost.items()}
