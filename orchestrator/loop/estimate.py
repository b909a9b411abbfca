"""Estimates for the update of the learners from experience: rewards, advantages, returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.algorithms.contract import Algorithm
from orchestrator.algorithms.groups import described
from orchestrator.algorithms.kl import kl_estimate
from orchestrator.algorithms.loss import mismatch
from orchestrator.algorithms.off_policy import measures
from orchestrator.algorithms.responses import Responses
from orchestrator.algorithms.rewards import (
    Normalisers,
    RunningNormaliser,
    combined,
    overlong_penalties,
    shape_rewards,
)
from orchestrator.loop.batch import Batch
from quartet.models.numerics import explained_variance, masked_mean
from quartet.wire.codec import Floats
from quartet.wire.pairs import SCORE


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
    normalisers: dict[str, RunningNormaliser]
    """The normalisers after this batch's scores."""
    metrics: dict[str, float]


def old_logprobs_of(batch: Batch, algorithm: Algorithm) -> Tensor | None:
    """The log-probs from before the update, [B, T], the learner's or the engine's as configured; None where no reward
    needs the learner's and the update computes them itself."""
    if algorithm.old_logprobs == "rollout":
        return batch.logprobs
    return batch.old_logprobs


def estimate_advantages(
    batch: Batch,
    old_logprobs: Tensor | None,
    algorithm: Algorithm,
    kl_coef: float,
    normalisers: Normalisers,
    *,
    step: int,
    longest: int | None = None,
) -> Advantages:
    """Computes rewards from scores and KL, and advantages and returns from rewards and, if there is a critic, values.

    Args:
        batch: B responses.
        old_logprobs: [B, T], from before the update: the learner's, so that the KL excludes the rollout engine's
            mismatch, or the engine's (algorithm.old_logprobs); None if no reward holds a KL penalty.
        algorithm: the estimator and its settings.
        kl_coef: coefficient of this batch.
        normalisers: running mean and deviation of earlier scores by name; of their sum, or of the only one, `score`.
        step: step that trains on the batch, from 1, by which the weights of named scores may change.
        longest: most tokens of a response, for algorithm.overlong_buffer.
    """
    scores, sampled, normalisers = batch.scores, batch.sampled, dict(normalisers)
    if algorithm.rewards:
        scores, normalisers = combined(batch.named_scores, batch.groups, algorithm.rewards, step, normalisers)
    if algorithm.normalise_scores:
        normalisers[SCORE] = normalisers.get(SCORE, RunningNormaliser()).update(scores)
        scores = normalisers[SCORE].normalise(scores)
    if algorithm.overlong_buffer:
        buffer, penalty = algorithm.overlong_buffer, algorithm.overlong_penalty
        scores = scores - overlong_penalties(batch.lengths, longest, buffer=buffer, penalty=penalty)
    in_reward = kl_coef if algorithm.kl.placement == "reward" else 0.0
    charged = in_reward > 0 and old_logprobs is not None
    rewards = shape_rewards(
        scores,
        _kl(batch, old_logprobs, algorithm, sampled) if charged else torch.zeros(sampled.shape),
        sampled,
        kl_coef=in_reward,
        clip=algorithm.score_clip,
        weight=algorithm.score_weight,
    )
    if (parts := batch.parts) is not None:
        divisor = normalisers[SCORE].deviation if algorithm.normalise_scores else 1.0
        parts = parts * (algorithm.score_weight / divisor)
    values = batch.values if algorithm.needs_critic else None
    advantages, returns = algorithm.credit(Responses(rewards, sampled, batch.mask, values, batch.groups, parts))

    metrics = {
        "reward/mean": float(rewards.sum(1).mean()),
        "kl/coef": kl_coef,
    }
    if returns is not None and batch.mask.any():
        metrics["value/explained_variance"] = explained_variance(batch.values, returns, batch.mask)
    learned = None if returns is None else batch.packed(returns)
    metrics |= _described(batch, algorithm, step)
    return Advantages(batch.packed(advantages), learned, normalisers, metrics)


def measure_distance(batch: Batch, own: Sequence[Floats], algorithm: Algorithm, version: int) -> Distance:
    """Measures `kl/reference`, `mismatch/*` and `off_policy/*` of B responses, by the tokens that are trained on;
    nothing if there is none. `mismatch/present_mean_abs` is that of the tokens which `version` itself sampled, if
    there are any.

    Args:
        batch: the responses.
        own: B arrays [t], the learner's log-probs before the update; [0] for responses of which they are not known.
            `mismatch/*` and `off_policy/*` are of the others alone.
        algorithm: the estimator and its settings.
        version: version of the learner's policy.
    """
    if not (trained := int(batch.mask.sum())):
        return Distance(None, {})
    own_logprobs = batch.padded(own)
    old_logprobs = batch.logprobs if algorithm.old_logprobs == "rollout" else own_logprobs
    kl = float(_kl(batch, old_logprobs, algorithm, batch.mask).sum(1).mean())
    kl *= int(batch.sampled.sum()) / trained  # of whole responses, also where tokens are left out
    metrics = {} if batch.ref_logprobs is None else {"kl/reference": kl}
    rows = torch.tensor([len(row) > 0 for row in own])[:, None]
    known = batch.mask & rows
    if known.any():
        metrics |= _off_policy(batch, own_logprobs, known, algorithm)
    if (present := known & batch.sampled_since(version)).any():
        difference = (own_logprobs - batch.logprobs).abs()
        metrics["mismatch/present_mean_abs"] = float(masked_mean(difference, present))
    return Distance(kl, metrics)


def _kl(batch: Batch, old_logprobs: Tensor, algorithm: Algorithm, mask: Tensor) -> Tensor:
    """The KL estimate per token of the mask, [B, T]; zeros without a reference."""
    reference = batch.ref_logprobs
    if reference is None:
        return torch.zeros_like(old_logprobs)
    return kl_estimate(old_logprobs, reference, algorithm.kl.estimator, mask)


def _described(batch: Batch, algorithm: Algorithm, step: int) -> dict[str, float]:
    """Scores, lengths, groups and tasks, and the shares of masked tokens and responses where there may be some."""
    metrics = {} if batch.oldest_trained is None else {"staleness/masked": batch.too_old}
    grouped = algorithm.samples_per_prompt > 1
    if grouped:
        metrics |= described(batch.scores, batch.groups)
    if algorithm.zero_variance == "leave-out" or algorithm.truncated == "mask":
        metrics["samples/left_out"] = batch.left_out
    for name, reward in algorithm.rewards.items():
        scores = batch.named_scores[name]
        metrics |= {f"score/{name}/mean": float(scores.mean()), f"score/{name}/std": float(scores.std(correction=0))}
        metrics[f"score/{name}/weight"] = reward.weight_at(step)
        metrics |= _under(f"score/{name}", described(scores, batch.groups) if grouped else {})
    for task, members in batch.by_task.items():
        metrics |= _under(f"task/{task}", _described_task(batch, members, grouped=grouped))
    return metrics | {
        "score/mean": float(batch.scores.mean()),
        "score/std": float(batch.scores.std(correction=0)),
        "response/length_mean": float(batch.lengths.float().mean()),
        "response/length_max": float(batch.mask.shape[1]),
        "response/truncated": batch.truncated,
    }


def _described_task(batch: Batch, members: Tensor, *, grouped: bool) -> dict[str, float]:
    """Number, scores and lengths of the samples of a task, at these places in the batch, [n] int64; and their groups,
    if there are several responses to a prompt."""
    named = {f"score/{name}": scores for name, scores in batch.named_scores.items()} | {"score": batch.scores}
    metrics = {f"{name}/mean": float(scores[members].mean()) for name, scores in named.items()}
    metrics |= described(batch.scores[members], batch.groups[members]) if grouped else {}
    return metrics | {
        "samples": float(len(members)),
        "response/length_mean": float(batch.lengths[members].float().mean()),
        "response/truncated": float(batch.columns["truncated"][members.numpy()].mean()),
    }


def _under(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _off_policy(batch: Batch, own_logprobs: Tensor, mask: Tensor, algorithm: Algorithm) -> dict[str, float]:
    """Measures of the distance between the samplers' policies and the learner's, and of its correction if there is
    one. All [B, T]."""
    cap, band = algorithm.importance_cap, algorithm.importance_band
    distance = mismatch(batch.logprobs, own_logprobs, mask, cap=cap)
    metrics = {f"mismatch/{name}": value for name, value in distance.items()}
    if not algorithm.corrects:
        return metrics
    kind = "dis" if algorithm.clip == "dis" else algorithm.correction
    cost = measures(
        kind,
        own_logprobs,
        batch.logprobs,
        mask,
        sampled=batch.sampled,
        cap=cap,
        band=band,
        segments=batch.sequences,
        sequence=algorithm.ratio == "sequence",
    )
    return metrics | {f"off_policy/{name}": value for name, value in cost.items()}
