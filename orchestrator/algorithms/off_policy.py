"""Corrections for samples of another policy than the one that trains, and how far apart the two are. Pure functions.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Three log-probs of the same
token: `logprobs` of the behaviour, which is the engine that sampled it; `old_logprobs` of the proximal policy, the
learner before its update; `new_logprobs` of the policy as it trains. k = exp(old_logprobs - logprobs). `sampled` is
True at every response token, also at those that are not trained on: a response's ratio is that of all its tokens.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from orchestrator.algorithms.kl import kl_estimate
from orchestrator.algorithms.loss import PolicyLoss, importance_weights, ratio
from quartet.models.numerics import check_masked, masked_mean, partial_mean

Correction = Literal["tis", "tis-sequence", "icepop", "geometric", "decoupled", "dis"]
BANDS: dict[str, tuple[float, float]] = {"icepop": (0.5, 5.0), "geometric": (0.99, 1.01), "dis": (0.2, 4.0)}
"""Correction -> default (lowest, highest) ratio that is trained on."""
QUANTILES = (0.01, 0.5, 0.99)


def correction_weights(
    kind: Correction,
    old_logprobs: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    *,
    sampled: Tensor,
    cap: float | None,
    band: tuple[float, float] | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Weights of the tokens in the policy's loss, detached, 1 off the mask. All [B, T].

    - tis: min(k, cap) per token, see `importance_weights`.
    - tis-sequence: min(product of k over the response, cap) for all its tokens: the unbiased ratio of whole responses
      (Precup et al. 2000), truncated (Ionides 2008). The product is over the sampled tokens: what comes after a token
      that is not trained on was sampled after it all the same.
    - icepop: k inside the band, 0 outside (Ring-1T, arXiv:2510.18855, M(k)).
    - geometric: 1 for responses whose geometric mean of k over the sampled tokens lies inside the band, 0 for the
      others, whole.
    - decoupled: k up to the cap, 0 above (AReaL, arXiv:2505.24298, with its filter of extreme weights).
    - dis: 1; its ratio is to the behaviour already, see `dis_loss`.

    Args:
        kind: the correction.
        old_logprobs, logprobs, mask, sampled: as said at the head of this file.
        cap: largest weight; None for no weights at all, or for decoupled for no filter.
        band: lowest and highest ratio; None for that of BANDS.
        segments: [B or 1, T] int64, which response of its row a token belongs to, from 0, where rows hold several.

    Raises:
        ValueError: an unknown kind, a cap below 1, or a band that does not hold 1.
    """
    low, high = _band(kind, band)
    k = ratio(old_logprobs, logprobs, mask).detach()
    match kind:
        case "tis":
            return importance_weights(old_logprobs, logprobs, mask, cap=cap)
        case "tis-sequence":
            log_k, _ = _per_response(old_logprobs - logprobs, sampled, segments)
            return importance_weights(log_k, torch.zeros_like(log_k), mask, cap=cap)
        case "icepop":
            return torch.where(mask & ((k < low) | (k > high)), 0.0, k)
        case "geometric":
            log_k, count = _per_response(old_logprobs - logprobs, sampled, segments)
            mean = (log_k / count.clamp(min=1)).exp()
            return torch.where(mask & ((mean < low) | (mean > high)), 0.0, torch.ones_like(k))
        case "decoupled":
            return k if cap is None else torch.where(mask & (k > cap), 0.0, k)
        case "dis":
            return torch.ones_like(k)
    raise ValueError(f"correction: unknown {kind!r}")


def dis_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    band: tuple[float, float] | None,
    weights: Tensor | None = None,
    denominator: float | Tensor,
) -> PolicyLoss:
    """-sum of weight r A, divided by `denominator`, over tokens whose r = exp(new_logprobs - logprobs) is inside the
    band. `weights` None means ones.

    Double-sided importance sampling of SAO (arXiv:2607.07508, eq. 3): the behaviour is the only policy that r is
    relative to, and tokens outside the band, or at its ends, have no gradient, whatever the sign of their advantage.
    The clip fractions are the shares of tokens that lie too low and too high, and approx_kl is to the behaviour.
    [B, T] -> each [].
    ValueError on a band that does not hold 1.
    """
    low, high = _band("dis", band)
    check_masked(mask, new_logprobs=new_logprobs, logprobs=logprobs, advantages=advantages)
    r = ratio(new_logprobs, logprobs, mask)
    inside = (r > low) & (r < high)
    objective = torch.where(inside, r * advantages, 0.0)

    def share(x: Tensor) -> Tensor:
        return partial_mean(x.detach(), mask, denominator)

    return PolicyLoss(
        loss=-partial_mean(objective if weights is None else objective * weights, mask, denominator),
        clip_fraction_low=share(r <= low),
        clip_fraction_high=share(r >= high),
        dual_clip_fraction=share(torch.zeros_like(r)),
        approx_kl=share(kl_estimate(logprobs, new_logprobs.detach(), "k3", mask)),
        ratio_mean=share(r),
        ratio_max=torch.where(mask, r, 0.0).max().detach(),
    )


def measures(
    kind: Correction,
    old_logprobs: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    *,
    sampled: Tensor,
    cap: float | None,
    band: tuple[float, float] | None,
) -> dict[str, float]:
    """Measures of a batch's correction. All [B, T] -> numbers.

    `ess`, the effective sample size (sum k)^2 / sum k^2 as a share of the tokens (Kish 1965), 1 on-policy; quantiles
    of k; `corrected`, the share of tokens whose weight is truncated or that are left out.
    """
    k = ratio(old_logprobs, logprobs, mask)[mask].double()
    measured = {"ess": float(k.sum().square() / (k.square().sum() * len(k)))}
    # Not torch's quantile, which takes 16 million numbers at most.
    for share, value in zip(QUANTILES, np.quantile(k.numpy(), QUANTILES), strict=True):
        measured[f"ratio_p{round(100 * share):02d}"] = float(value)
    if kind == "dis":
        low, high = _band(kind, band)
        r = ratio(old_logprobs, logprobs, mask)
        corrected = (r <= low) | (r >= high)
    else:
        weights = correction_weights(kind, old_logprobs, logprobs, mask, sampled=sampled, cap=cap, band=band)
        limit = torch.inf if cap is None else cap
        corrected = (weights == 0) if kind in ("icepop", "geometric", "decoupled") else (weights >= limit)
    return measured | {"corrected": float(masked_mean(corrected, mask))}


def segments_of(steps: Tensor) -> Tensor:
    """Index, from 0, of each column's response in its row: [1, C] from the columns' steps, see PairTensors."""
    return (steps == 0).long().cumsum(dim=1) - 1


def _per_response(values: Tensor, mask: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """At each token the sum of `values` over the tokens of its response, and how many those are. [B, T] each."""
    values = torch.where(mask, values, 0.0).detach()
    index = torch.zeros_like(mask, dtype=torch.long) if segments is None else segments.expand_as(mask)
    # A row holds no more responses than columns; reading how many would wait for the device.
    sums = [torch.zeros_like(x).scatter_add(1, index, x) for x in (values, mask.to(values.dtype))]
    return sums[0].gather(1, index), sums[1].gather(1, index)


def _band(kind: str, band: tuple[float, float] | None) -> tuple[float, float]:
    low, high = band or BANDS.get(kind, (0.0, torch.inf))
    if not 0 <= low < 1 < high:
        raise ValueError(f"band must hold 1, got {low} to {high}")
    return low, high
