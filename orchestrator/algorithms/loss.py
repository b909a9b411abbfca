"""The clipped policy loss, its importance weights, and how far two engines' log-probs differ. Pure functions, no I/O.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Index t is response
token t everywhere: logprobs[:, t] = log pi(y_t | prefix), values[:, t] = V(prefix). Every function but
`ratio` and `surrogate` raises ValueError if a mask is not boolean or a shape differs from the mask's.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate
from quartet.models.numerics import check_masked, masked_mean, partial_mean


def ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), the exponent held within +-20 (no gradient beyond); 1 off the mask.

    All [B, T]; shapes are not checked."""
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
    return ratio(old_logprobs, logprobs, mask).clamp(max=cap).detach()


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
    """-sum over the mask of weight * `surrogate`(ratio, A), divided by `denominator`. All [B, T] -> each [].

    ratio = exp(new_logprobs - old_logprobs), the exponent held within +-20: a token gone astray gives a large
    finite loss and no gradient, not inf or NaN. `weights` are `importance_weights`, None means ones;
    `denominator` is the minibatch's token count, see `partial_mean`. ValueError as for these two functions.
    """
    weights = torch.ones_like(old_logprobs) if weights is None else weights
    check_masked(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs)
    check_masked(mask, advantages=advantages, weights=weights)
    r = ratio(new_logprobs, old_logprobs, mask)
    objective = surrogate(r, advantages, clip_eps_low, clip_eps_high, dual_clip)

    def share(x: Tensor) -> Tensor:
        return partial_mean(x.detach(), mask, denominator)

    return PolicyLoss(
        loss=-partial_mean(objective * weights, mask, denominator),
        clip_fraction_low=share((advantages < 0) & (r < 1 - clip_eps_low)),
        clip_fraction_high=share((advantages > 0) & (r > 1 + clip_eps_high)),
        dual_clip_fraction=share((advantages < 0) & (r > (dual_clip or math.inf))),
        approx_kl=share(kl_estimate(old_logprobs, new_logprobs, "k3", mask)),
        ratio_mean=share(r),
        ratio_max=torch.where(mask, r, 0.0).max().detach(),
    )


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    """PPO's clipped objective per token, to be maximised. ratio, advantages [*same] -> [*same].

    min(ratio A, clip(ratio, 1 - low, 1 + high) A): Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with
    separate bounds as in DAPO (Yu et al. 2025, arXiv:2503.14476). Where A < 0, at least dual * A, if dual is given
    (Ye et al. 2020, arXiv:1912.09729, eq. 5). ValueError unless 0 < low <= 1, high > 0 and dual > 1.
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
    """Distance of the sampler's log-probs from the learner's for the same tokens. All [B, T] -> numbers.

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
