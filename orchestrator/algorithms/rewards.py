"""Rewards per token, the score of several named ones, and the running normaliser of scores. Pure functions, no I/O.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Index t is response
token t everywhere: logprobs[:, t] = log pi(y_t | prefix), values[:, t] = V(prefix). Every function raises
ValueError if a mask is not boolean or a shape differs from the mask's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from orchestrator.algorithms.groups import compared
from orchestrator.algorithms.named import NamedRewardConfig
from quartet.models.numerics import VARIANCE_EPS, check_masked


def shape_rewards(
    scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float, clip: float | None, weight: float = 1.0
) -> Tensor:
    """-kl_coef * kl at every token, plus the response's score at its last one. -> [B, T], zero off the mask.

    scores [B], clipped to +-clip unless clip is None, then times `weight`; kl, mask [B, T]. A response's rewards then
    sum to that - kl_coef * KL (Ziegler et al. 2019, eq. 2). ValueError if a response has no token, or if clip <= 0.
    """
    check_masked(mask, kl=kl)
    some = mask.any(dim=1)
    check_masked(some, scores=scores)
    _check_scores(scores)
    limit = math.inf if clip is None else clip
    if not limit > 0:
        raise ValueError(f"clip must be > 0, or None for no clip, got {clip}")
    if not bool(some.all()):
        raise ValueError("mask has a row without a response token: its score has nowhere to go")
    bonus = weight * scores.clamp(-limit, limit).unsqueeze(1)
    return torch.where(mask, -kl_coef * kl, 0.0) + torch.where(_last(mask), bonus, 0.0)


def at_own_tokens(rewards: Tensor, parts: Tensor, mask: Tensor) -> Tensor:
    """The rewards with these parts of each response's score at their own tokens in place of its last. All [B, T].

    The sums stay. For example the rewards 0, 0, 0, 5 of a response whose second token ends a turn that was worth 2
    become 0, 2, 0, 3: no token after it is given credit for it.
    """
    check_masked(mask, rewards=rewards, parts=parts)
    own = torch.where(mask, parts, 0.0)
    return rewards + own - torch.where(_last(mask), own.sum(1, keepdim=True), 0.0)


def _last(mask: Tensor) -> Tensor:
    """True at the last token of each row's mask. [B, T] -> [B, T]."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    return steps == torch.where(mask, steps, -1).amax(dim=1, keepdim=True)


def overlong_penalties(lengths: Tensor, longest: int | None, *, buffer: int, penalty: float) -> Tensor:
    """The parts of their scores that responses lose by their lengths. lengths int [B] -> [B].

    Nothing up to `longest` - `buffer` tokens, then `penalty` / `buffer` for each token more, so that a response of
    `longest` tokens loses `penalty` (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13). With a longest of 8 tokens, a
    buffer of 4 and a penalty of 1, responses of 4, 5 and 8 tokens lose 0, 0.25 and 1. ValueError unless the buffer is
    a part of the longest response.
    """
    if longest is None or not 0 < buffer <= longest:
        raise ValueError(f"buffer must lie in 1..{longest}, the longest response, got {buffer}")
    return (lengths - (longest - buffer)).clamp(min=0) * (penalty / buffer)


def carry_back(rewards: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """The rewards of tokens that are not trained on, added to the last trained token before them. All [B, T].

    `gae` steps over tokens off its mask as over a single transition; what they earned is then earned on the way from
    the token before them to the one after them. For example rewards 1, 2, 4, 8 of tokens of which the second and the
    last are not trained on become 3, 0, 12, 0. What comes before a response's first trained token is none of its
    consequences, and is left out; a response without a trained token has no rewards.

    Args:
        rewards: the rewards, as `shape_rewards` gives them.
        sampled: True at response tokens.
        mask: True at those that are trained on.
    """
    check_masked(mask, rewards=rewards, sampled=sampled)
    steps = torch.arange(mask.shape[1], device=mask.device)
    owners = torch.where(mask, steps, -1).cummax(dim=1).values
    earned = torch.where(sampled & (owners >= 0), rewards, 0.0)
    return torch.zeros_like(earned).scatter_add(1, owners.clamp(min=0), earned)


def _check_scores(scores: Tensor) -> None:
    if scores.dim() != 1 or not bool(scores.isfinite().all()):
        raise ValueError(f"scores must be finite numbers [N], got {scores.tolist()}")


@dataclass(frozen=True)
class RunningNormaliser:
    """Mean and sum of squares about it (`m2`) of all scores seen (Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def update(self, scores: Tensor) -> Self:
        """The normaliser after also seeing scores [N], N may be 0. ValueError if one is not finite."""
        _check_scores(scores)
        if len(scores) == 0:
            return self
        batch, count = scores.double(), self.count + len(scores)
        delta = float(batch.mean()) - self.mean
        between = delta**2 * self.count * len(scores) / count
        within = float((batch - batch.mean()).square().sum())
        mean = self.mean + delta * len(scores) / count
        return replace(self, count=count, mean=mean, m2=self.m2 + within + between)

    def normalise(self, scores: Tensor) -> Tensor:
        """(scores - mean) / sqrt(unbiased variance + 1e-8); unchanged before two were seen. [N] -> [N]."""
        return scores if self.count < 2 else (scores - self.mean) / self.deviation

    @property
    def deviation(self) -> float:
        """The number that `normalise` divides by; 1 before two were seen."""
        return 1.0 if self.count < 2 else math.sqrt(self.m2 / (self.count - 1) + VARIANCE_EPS)


Normalisers = Mapping[str, RunningNormaliser]
"""Name of a score -> mean and deviation of all that were seen."""


def combined(
    scores: Mapping[str, Tensor],
    groups: Tensor,
    rewards: Mapping[str, NamedRewardConfig],
    step: int,
    normalisers: Normalisers,
) -> tuple[Tensor, dict[str, RunningNormaliser]]:
    """The sum of named scores, each normalised, clipped and weighted. name -> [B] to [B] float32.

    s = sum over names k of weight_k(step) * clip_k(normalise_k(x_k)), in float64. Normalised by their groups it is
    the reward of GDPO (Liu et al. 2026, arXiv:2601.05242): two responses to a prompt with scores 1, 0 of one name and
    10, 30 of another, both of weight 1, have 0.71 - 0.71 = 0 each, where the plain sum has 11 and 30. A response
    alone in its group, and equal scores, have 0 (`groups.compared`).

    Args:
        scores: name -> the scores.
        groups: number of each response's group, int64 [B].
        rewards: name -> its weight, clip and normalisation, in the order of the sum.
        step: step that trains on these scores, from 1, by which weights may change.
        normalisers: name -> those of the steps before, of names that are normalised by them.

    Returns:
        The sums, and the normalisers after these scores.
    """
    after, terms = dict(normalisers), []
    for name, reward in rewards.items():
        term = scores[name].double()
        if reward.normalise == "group":
            term = compared(term, groups, leave_one_out=False, divide=True)
        elif reward.normalise == "running":
            after[name] = after.get(name, RunningNormaliser()).update(scores[name])
            term = after[name].normalise(term)
        if reward.clip is not None:
            term = term.clamp(-reward.clip, reward.clip)
        terms.append(reward.weight_at(step) * term)
    return sum(terms[1:], terms[0]).float(), after
