"""PPO's arithmetic: KL estimates, shaped rewards, advantages, the clipped loss. Pure functions, no I/O.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Index t is response
token t everywhere: logprobs[:, t] = log pi(y_t | prefix), values[:, t] = V(prefix). Every function raises
ValueError if a mask is not boolean or a shape differs from the mask's.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from services.common.numerics import check_masked, masked_mean, masked_var, partial_mean

KLKind = Literal["k1", "k2", "k3"]
KL_ERROR_CLIP = 0.2  # Ziegler et al. 2019, section 2.2
LOG_RATIO_LIMIT = 20.0  # e^20 = 5e8: far past any clip, far from overflow
VARIANCE_EPS = 1e-8  # added to a variance: a spread far below 1e-4 counts as none


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind, mask: Tensor | None = None) -> Tensor:
    """One-sample estimates of KL(pi || ref) at tokens drawn from pi. [B, T], [B, T] -> [B, T], in nats.

    Schulman, "Approximating KL divergence" (2020), with log r = ref_logprobs - logprobs:
    k1 = -log r (unbiased), k2 = (log r)^2 / 2 (biased, >= 0), k3 = (r - 1) - log r (unbiased, >= 0).

    In the reward k1 or k3 are right. In the loss they are differentiated, and then (Tang and Munos 2025,
    arXiv:2506.09477), in expectation over the next token given its prefix:
    - k1 gives E[grad log pi] = 0: noise and no pull to the reference. Do not put it in a loss.
    - k2 gives E[(log pi - log ref) grad log pi], the gradient of KL(pi || ref). Use this one.
    - k3 gives E[(1 - r) grad log pi], the gradient of the other direction, KL(ref || pi).

    k3 holds r at e^20 above that, without overflow or gradient through r. With a `mask` the result is zero
    off it, and NaN there stays out of the backward pass. ValueError on an unknown kind.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    check_masked(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_r = torch.where(mask, ref_logprobs - logprobs, 0.0)
    match kind:
        case "k1":
            return -log_r
        case "k2":
            return 0.5 * log_r.square()
        case "k3":
            return torch.expm1(log_r.clamp(max=LOG_RATIO_LIMIT)) - log_r
    raise ValueError(f"kind must be 'k1', 'k2' or 'k3', got {kind!r}")


@dataclass(frozen=True)
class FixedKL:
    """A KL coefficient that stays. ValueError unless coef >= 0."""

    coef: float

    def __post_init__(self) -> None:
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"coef must be >= 0 and finite, got {self.coef}")

    def update(self, kl: float, samples: int) -> Self:
        """The same controller, whatever `kl` was measured."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient steered so that the measured KL comes to `target` (Ziegler et al. 2019, section 2.2).

    `target` in nats per response; over `horizon` responses, a KL that is 20% or more off target changes the
    coefficient by about 20%. ValueError unless all three are > 0.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("coef", "target", "horizon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {getattr(self, name)}")

    def update(self, kl: float, samples: int) -> Self:
        """coef * (1 + e * samples / horizon), e = clip(kl / target - 1, -0.2, 0.2).

        `kl`: mean over `samples` responses of the KL summed over their tokens. ValueError if it is not
        finite, or if horizon <= 0.2 * samples, where the factor could reach zero.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl must be finite, got {kl}")
        if self.horizon <= KL_ERROR_CLIP * samples:
            raise ValueError(f"horizon must be > {KL_ERROR_CLIP} * {samples} samples, got {self.horizon}")
        error = min(max(kl / self.target - 1, -KL_ERROR_CLIP), KL_ERROR_CLIP)
        return replace(self, coef=self.coef * (1 + error * samples / self.horizon))


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float, clip: float | None) -> Tensor:
    """-kl_coef * kl at every token, plus the response's score at its last one. -> [B, T], zero off the mask.

    scores [B], clipped to +-clip unless clip is None; kl, mask [B, T]. A response's rewards then sum to score
    - kl_coef * KL (Ziegler et al. 2019, eq. 2). ValueError if a response has no token, or if clip <= 0.
    """
    check_masked(mask, kl=kl)
    check_masked(mask.any(dim=1), scores=scores)
    _check_scores(scores)
    limit = math.inf if clip is None else clip
    if not limit > 0:
        raise ValueError(f"clip must be > 0, or None for no clip, got {clip}")
    if not bool(mask.any(dim=1).all()):
        raise ValueError("mask has a row without a response token: its score has nowhere to go")
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(dim=1, keepdim=True)
    bonus = scores.clamp(-limit, limit).unsqueeze(1)
    return torch.where(mask, -kl_coef * kl, 0.0) + torch.where(steps == last, bonus, 0.0)


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
        if self.count < 2:
            return scores
        return (scores - self.mean) / math.sqrt(self.m2 / (self.count - 1) + VARIANCE_EPS)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, and returns = advantages + values. All [B, T], zero off the mask.

    Schulman et al. 2015 (arXiv:1506.02438), eq. 16, as a recursion from the last token backwards: delta_t =
    r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma gae_lambda A_t+1. A gap in a row's mask is stepped over.

    After the last token V is zero, as the episode ends there. For a response cut at the length limit this
    takes its score for all there was to earn; to add what it would have gone on to earn give `bootstrap` [B],
    the value after the last token, zero for finished responses. ValueError if a factor is outside 0..1.
    """
    check_masked(mask, rewards=rewards, values=values)
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name} must lie in 0..1, got {factor}")
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    following = carry if bootstrap is None else bootstrap
    check_masked(mask.any(dim=1), bootstrap=following)
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = torch.where(here, delta + gamma * gae_lambda * carry, carry)
        following = torch.where(here, values[:, t], following)
        advantages[:, t] = torch.where(here, carry, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(advantages: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Unit variance and, if `shift_mean`, zero mean over the masked batch. All [B, T], zero off the mask.

    (A - mean) / sqrt(unbiased variance + 1e-8), the mean not added back; without `shift_mean` A / sqrt(...),
    which keeps every sign. ValueError with fewer than two tokens.
    """
    shift = masked_mean(advantages, mask) if shift_mean else 0.0
    scale = torch.rsqrt(masked_var(advantages, mask) + VARIANCE_EPS)
    return torch.where(mask, (advantages - shift) * scale, 0.0)


def _ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), the exponent held within +-20 (no gradient beyond); 1 off the mask."""
    log_ratio = torch.where(mask, logprobs - base_logprobs, 0.0)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(old_logprobs: Tensor, logprobs: Tensor, mask: Tensor, *, cap: float | None) -> Tensor:
    """Truncated importance weights min(pi_old / pi_behaviour, cap), detached, 1 off the mask. All [B, T].

    `logprobs` are the sampler's, `old_logprobs` the learner's before its update: the weights correct for the
    two engines' disagreement (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training"), the cap bounds their variance (Ionides 2008, "Truncated Importance Sampling"). All 1 if cap is
    None. ValueError if cap < 1, which would shrink even tokens that agree.
    """
    check_masked(mask, old_logprobs=old_logprobs, logprobs=logprobs)
    if cap is None:
        return torch.ones_like(old_logprobs)
    if not cap >= 1:
        raise ValueError(f"cap must be >= 1, or None for no correction, got {cap}")
    return _ratio(old_logprobs, logprobs, mask).clamp(max=cap).detach()


class PolicyLoss(NamedTuple):
    """Each []; only `loss` has a gradient. All but `ratio_max` add up over micro-batches and ranks."""

    loss: Tensor
    clip_fraction_low: Tensor  # A < 0 and ratio < 1 - clip_eps_low: no gradient
    clip_fraction_high: Tensor  # A > 0 and ratio > 1 + clip_eps_high: no gradient
    dual_clip_fraction: Tensor  # A < 0 and ratio > dual_clip: no gradient
    approx_kl: Tensor  # k3 estimate of KL(old || new), nats per token
    ratio_mean: Tensor
    ratio_max: Tensor  # a plain maximum, 0 on an empty mask


def policy_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None,
    weights: Tensor | None,
    denominator: float | Tensor,
) -> PolicyLoss:
    """-sum over the mask of weight * `surrogate`(ratio, A), over `denominator`. All [B, T] -> each [].

    ratio = exp(new_logprobs - old_logprobs), the exponent held within +-20: a token gone astray gives a large
    finite loss and no gradient, not inf or NaN. `weights` are `importance_weights`, None means ones;
    `denominator` is the minibatch's token count, see `partial_mean`. ValueError as for these two functions.
    """
    weights = torch.ones_like(old_logprobs) if weights is None else weights
    check_masked(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs)
    check_masked(mask, advantages=advantages, weights=weights)
    ratio = _ratio(new_logprobs, old_logprobs, mask)
    objective = surrogate(ratio, advantages, clip_eps_low, clip_eps_high, dual_clip)

    def share(x: Tensor) -> Tensor:
        return partial_mean(x.detach(), mask, denominator)

    return PolicyLoss(
        loss=-partial_mean(objective * weights, mask, denominator),
        clip_fraction_low=share((advantages < 0) & (ratio < 1 - clip_eps_low)),
        clip_fraction_high=share((advantages > 0) & (ratio > 1 + clip_eps_high)),
        dual_clip_fraction=share((advantages < 0) & (ratio > (dual_clip or math.inf))),
        approx_kl=share(kl_estimate(old_logprobs, new_logprobs, "k3", mask)),
        ratio_mean=share(ratio),
        ratio_max=torch.where(mask, ratio, 0.0).max().detach(),
    )


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's clipped objective per token, to be maximised. ratio, advantages [*same] -> [*same].

    min(ratio A, clip(ratio, 1 - low, 1 + high) A): Schulman et al. 2017 (arXiv:1707.06347), eq. 7, the bounds
    apart as in DAPO (Yu et al. 2025, arXiv:2503.14476). Where A < 0, at least dual * A, if dual is given (Ye
    et al. 2020, arXiv:1912.09729, eq. 5). ValueError unless 0 < low <= 1, high > 0 and dual > 1.
    """
    if not (0 < low <= 1 and 0 < high < math.inf):
        raise ValueError(f"clip_eps_low must lie in (0, 1] and clip_eps_high be > 0, got {low} and {high}")
    if dual is not None and not 1 < dual < math.inf:
        raise ValueError(f"dual_clip must be > 1, or None for no dual clip, got {dual}")
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is None:
        return objective
    return torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)


def mismatch(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, cap: float | None) -> dict[str, float]:
    """How far the sampler's log-probs are from the learner's for the same tokens. All [B, T] -> numbers.

    `mean_abs` and `max_abs` of the difference and `kl`, the k3 estimate of KL(sampler || learner), in nats;
    `capped`, the share of tokens with pi_old / pi_behaviour > cap. ValueError on an empty mask.
    """
    kl = kl_estimate(logprobs, old_logprobs, "k3", mask)
    delta = torch.where(mask, old_logprobs - logprobs, 0.0)
    return {
        "mean_abs": float(masked_mean(delta.abs(), mask)),
        "max_abs": float(delta.abs().max()),
        "kl": float(masked_mean(kl, mask)),
        "capped": float(masked_mean(delta.exp() > (cap or math.inf), mask)),
    }
