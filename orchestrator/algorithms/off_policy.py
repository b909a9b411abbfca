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

from orchestrator.algorithms.contract import Correction
from orchestrator.algorithms.loss import importance_weights, per_response, ratio, sequence_ratio
from quartet.models.numerics import masked_mean

BANDS: dict[str, tuple[float, float]] = {"icepop": (0.5, 5.0), "geometric": (0.99, 1.01), "dis": (0.2, 4.0)}
"""Correction, or clip -> default (lowest, highest) ratio that is trained on."""
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
    sequence: bool = False,
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

    With `sequence` k is the geometric mean over the sampled tokens of a response, for all its tokens.

    Args:
        kind: the correction.
        old_logprobs, logprobs, mask, sampled: as said at the head of this file.
        cap: largest weight; None for no weights at all, or for decoupled for no filter.
        band: lowest and highest ratio; None for that of BANDS.
        segments: [B or 1, T] int64, which response of its row a token belongs to, from 0, where rows hold several.
        sequence: True where the policy's ratio is that of whole responses.

    Raises:
        ValueError: an unknown kind, a cap below 1, or a band that does not hold 1.
    """
    low, high = band_of(kind, band)
    log_k = (old_logprobs - logprobs).detach()
    zeros = torch.zeros_like(log_k)
    if sequence or kind in ("tis-sequence", "geometric"):
        product, count = per_response(log_k, sampled, segments)
        mean = product / count.clamp(min=1)
        log_k = mean if sequence else log_k
    k = ratio(log_k, zeros, mask)
    match kind:
        case "tis":
            return importance_weights(log_k, zeros, mask, cap=cap)
        case "tis-sequence":
            return importance_weights(product, zeros, mask, cap=cap)
        case "icepop":
            return torch.where((k < low) | (k > high), 0.0, k)
        case "geometric":
            outside = (mean.exp() < low) | (mean.exp() > high)
            return torch.where(mask & outside, 0.0, torch.ones_like(k))
        case "decoupled":
            return k if cap is None else torch.where(k > cap, 0.0, k)
    raise ValueError(f"correction: unknown {kind!r}")


def measures(
    kind: Correction | Literal["dis"],
    old_logprobs: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    *,
    sampled: Tensor,
    cap: float | None,
    band: tuple[float, float] | None,
    segments: Tensor | None = None,
    sequence: bool = False,
) -> dict[str, float]:
    """Measures of a batch's correction, or of clip dis in its place, given as to `correction_weights`. All [B, T] ->
    numbers.

    `ess`, the effective sample size (sum k)^2 / sum k^2 as a share of the tokens (Kish 1965), 1 on-policy; quantiles
    of k; `corrected`, the share of tokens whose weight is truncated or that are left out.
    """
    # numpy chooses without the place of each number, which is four times as large; and its quantile takes more than
    # the 16 million numbers of torch's.
    k = torch.from_numpy(ratio(old_logprobs, logprobs, mask).numpy()[mask.numpy()].astype(np.float64))
    measured = {"ess": float(k.sum().square() / (k.square().sum() * len(k)))}
    for share, value in zip(QUANTILES, np.quantile(k.numpy(), QUANTILES, overwrite_input=True), strict=True):
        measured[f"ratio_p{round(100 * share):02d}"] = float(value)
    del k  # twice as large as a column
    if kind == "dis":
        low, high = band_of(kind, band)
        sides = old_logprobs, logprobs, mask
        r = sequence_ratio(*sides, segments) if sequence else ratio(*sides)
        corrected = (r <= low) | (r >= high)
    else:
        weights = correction_weights(
            kind,
            old_logprobs,
            logprobs,
            mask,
            sampled=sampled,
            cap=cap,
            band=band,
            segments=segments,
            sequence=sequence,
        )
        limit = torch.inf if cap is None else cap
        corrected = (weights == 0) if kind in ("icepop", "geometric", "decoupled") else (weights >= limit)
    return measured | {"corrected": float(masked_mean(corrected, mask))}


def segments_of(steps: Tensor) -> Tensor:
    """Index, from 0, of each column's response in its row: [1, C] from the columns' steps, see PairTensors."""
    return (steps == 0).long().cumsum(dim=1) - 1


def band_of(kind: str, band: tuple[float, float] | None) -> tuple[float, float]:
    """The band, or the default of a correction or clip; any ratio for those that have none. ValueError if it does not
    hold 1."""
    low, high = band or BANDS.get(kind, (0.0, torch.inf))
    if not 0 <= low < 1 < high:
        raise ValueError(f"band must hold 1, got {low} to {high}")
    return low, high
