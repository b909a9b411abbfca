"""The bounded policy loss, its importance weights, and how far two engines' log-probs differ. Pure functions, no I/O.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Index t is response
token t everywhere: logprobs[:, t] = log pi(y_t | prefix), values[:, t] = V(prefix). Unless they say otherwise,
functions raise ValueError if a mask is not boolean or a shape differs from the mask's.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.algorithms.contract import Clip
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


def sequence_ratio(logprobs: Tensor, base_logprobs: Tensor, mask: Tensor, segments: Tensor | None) -> Tensor:
    """The geometric mean of `ratio` over the tokens of the mask of a response, at each of them; 1 off the mask.

    The importance ratio of GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 7), whose gradient goes through all tokens.
    All [B, T], with segments as of `per_response`; shapes are not checked."""
    sums, counts = per_response(logprobs - base_logprobs, mask, segments)
    return ratio(sums / counts.clamp(min=1), torch.zeros_like(sums), mask)


def per_response(values: Tensor, mask: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """At each token the sum of `values` over the tokens of the mask in its response, and how many those are.

    All [B, T]. `segments`, [B or 1, T] int64, says which response of its row a token belongs to, from 0; None: a row
    is one response."""
    values = torch.where(mask, values, 0.0)
    index = torch.zeros_like(mask, dtype=torch.long) if segments is None else segments.expand_as(mask)
    # A row holds no more responses than columns; reading how many would wait for the device.
    sums = [torch.zeros_like(x).scatter_add(1, index, x) for x in (values, mask.to(values.dtype))]
    return sums[0].gather(1, index), sums[1].gather(1, index)


class Bounded(NamedTuple):
    """An objective per token, to be maximised, and where its bounds take the gradient. Each [B, T]."""

    objective: Tensor
    low: Tensor  # True where the ratio is too small
    high: Tensor  # True where it is too large
    dual: Tensor  # True where it is too large for the dual clip


Bound = Callable[[Tensor, Tensor, Tensor], Bounded]
"""Bounds the ratios r of tokens with these log-probs and advantages: r, logprobs, advantages [B, T]."""


def bound(
    clip: Clip,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    cap: float = math.inf,
    band: tuple[float, float] = (0.0, math.inf),
) -> Bound:
    """The bound that `Algorithm.clip` names.

    - ppo: `surrogate` by low, high and dual, the distances from 1 and the dual clip.
    - cispo: min(r, cap) log pi, the first factor without a gradient: every token keeps its own (MiniMax-M1, 2025,
      arXiv:2506.13585, eq. 4; with one bound, as in ScaleRL, arXiv:2510.13786). At r = 1 it is REINFORCE.
    - dis: r A inside the band, else 0, whatever the sign of A: double-sided importance sampling of SAO
      (arXiv:2607.07508, eq. 3). The ends of the band are outside.
    - none: r A.
    """

    def ppo(r: Tensor, logprobs: Tensor, advantages: Tensor) -> Bounded:
        return Bounded(
            surrogate(r, advantages, low, high, dual),
            (advantages < 0) & (r < 1 - low),
            (advantages > 0) & (r > 1 + high),
            (advantages < 0) & (r > (dual or math.inf)),
        )

    def cispo(r: Tensor, logprobs: Tensor, advantages: Tensor) -> Bounded:
        none = torch.zeros_like(r, dtype=torch.bool)
        return Bounded(r.detach().clamp(max=cap) * advantages * logprobs, none, r > cap, none)

    def dis(r: Tensor, logprobs: Tensor, advantages: Tensor) -> Bounded:
        inside = (r > band[0]) & (r < band[1])
        objective = torch.where(inside, r * advantages, 0.0)
        return Bounded(objective, r <= band[0], r >= band[1], torch.zeros_like(inside))

    def unbounded(r: Tensor, logprobs: Tensor, advantages: Tensor) -> Bounded:
        none = torch.zeros_like(r, dtype=torch.bool)
        return Bounded(r * advantages, none, none, none)

    bounds: dict[Clip, Bound] = {"ppo": ppo, "cispo": cispo, "dis": dis, "none": unbounded}
    return bounds[clip]


class PolicyLoss(NamedTuple):
    """Each []; only `loss` has a gradient. All but `ratio_max` add up over micro-batches and ranks."""

    loss: Tensor
    clip_fraction_low: Tensor  # share of tokens without a gradient as their ratio is too small
    clip_fraction_high: Tensor  # too large; with cispo the gradient is bounded
    dual_clip_fraction: Tensor  # too large for the dual clip
    approx_kl: Tensor  # k3 estimate of KL(old || new), nats per token
    ratio_mean: Tensor
    ratio_max: Tensor  # a plain maximum, 0 on an empty mask


def policy_loss(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bound: Bound,
    weights: Tensor | None,
    denominator: float | Tensor,
    sequence: bool = False,
    segments: Tensor | None = None,
) -> PolicyLoss:
    """-sum over the mask of weight * bounded objective, divided by `denominator`. All [B, T] -> each [].

    Args:
        new_logprobs: of the policy as it trains.
        old_logprobs: what the ratio is relative to: ratio = exp(new_logprobs - old_logprobs), the exponent held
            within +-20, so that a token gone astray gives a large finite loss and no gradient, not inf or NaN.
        advantages: one for each token; with `sequence` the same for all tokens of a response.
        mask: True at the tokens that are trained on.
        bound: bounds the ratio, see `bound`.
        weights: factors of the tokens, for instance `importance_weights`; None means ones.
        denominator: the minibatch's token count, see `partial_mean`.
        sequence: True takes the ratio of whole responses, see `sequence_ratio`.
        segments: with `sequence`, which response of its row a token belongs to, see `per_response`.

    Raises:
        ValueError: a shape differs from the mask's, or as of `surrogate` and `partial_mean`.
    """
    weights = torch.ones_like(old_logprobs) if weights is None else weights
    check_masked(mask, new_logprobs=new_logprobs, old_logprobs=old_logprobs)
    check_masked(mask, advantages=advantages, weights=weights)
    if sequence:
        r = sequence_ratio(new_logprobs, old_logprobs, mask, segments)
    else:
        r = ratio(new_logprobs, old_logprobs, mask)
    bounded = bound(r, torch.where(mask, new_logprobs, 0.0), advantages)

    def share(x: Tensor) -> Tensor:
        return partial_mean(x.detach(), mask, denominator)

    return PolicyLoss(
        loss=-partial_mean(bounded.objective * weights, mask, denominator),
        clip_fraction_low=share(bounded.low),
        clip_fraction_high=share(bounded.high),
        dual_clip_fraction=share(bounded.dual),
        approx_kl=share(kl_estimate(old_logprobs, new_logprobs.detach(), "k3", mask)),
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
    distance = delta.abs()
    return {
        "mean_abs": float(masked_mean(distance, mask)),
        "max_abs": float(distance.max()),
        "kl": float(masked_mean(kl, mask)),
        "capped": float(masked_mean(delta.exp() > (cap or math.inf), mask)),
    }
