"""KL estimates and the adaptation of their coefficient. Pure functions, no I/O.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Index t is response
token t everywhere: logprobs[:, t] = log pi(y_t | prefix), values[:, t] = V(prefix). Every function raises
ValueError if a mask is not boolean or a shape differs from the mask's.
"""

import math

import torch
from torch import Tensor

from orchestrator.algorithms.contract import KLKind
from quartet.models.numerics import check_masked

KL_ERROR_CLIP = 0.2  # Ziegler et al. 2019, section 2.2
LOG_RATIO_LIMIT = 20.0  # e^20 = 5e8: far past any clip, far from overflow


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind, mask: Tensor | None = None) -> Tensor:
    """One-sample estimates of KL(pi || ref) at tokens drawn from pi. [B, T], [B, T] -> [B, T], in nats.

    Schulman, "Approximating KL divergence" (2020), with log r = ref_logprobs - logprobs:
    k1 = -log r (unbiased), k2 = (log r)^2 / 2 (biased, >= 0), k3 = (r - 1) - log r (unbiased, >= 0).

    As a penalty each has one place, for two reasons (Tang and Munos 2025, arXiv:2506.09477; Liu et al. 2025,
    arXiv:2510.01555). A reward is not differentiated, so that its gradient is E[k grad log pi]:
    - k1 gives the gradient of KL(pi || ref) over whole responses: E[grad k1] = E[grad log pi] is zero, nothing is
      left out. Use this one.
    - k2 and k3 leave out E[grad k]. With k3 that is the gradient of KL(ref || pi), which near the reference is that
      of KL(pi || ref) but for terms of second order: what is left pulls hardly at all, and not to the reference.

    In the loss only k itself is differentiated, not what is sampled after it. In expectation over the next token
    given its prefix:
    - k1 gives E[grad log pi] = 0: noise and no pull to the reference.
    - k2 gives E[(log pi - log ref) grad log pi], the gradient of that token's KL(pi || ref).
    - k3 gives E[(1 - r) grad log pi], the gradient of the other direction, KL(ref || pi), of that token.
    Neither charges a token for the KL of the tokens that follow it, so a coefficient weighs less than in the reward;
    nor is either weighted where samples are another policy's.

    k3 takes e^20 for a larger r: no overflow, and no gradient through that r. With a `mask` the result is zero off
    it, and NaN there stays out of the backward pass. ValueError on an unknown kind.
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


def adapted(coef: float, kl: float, samples: int, *, target: float, horizon: float) -> float:
    """The KL coefficient after a batch, steered so that the measured KL comes to `target` (Ziegler et al. 2019,
    section 2.2): coef * (1 + e * samples / horizon), e = clip(kl / target - 1, -0.2, 0.2).

    For example with a horizon of 10,000 a batch of 500 that is 20% or more off target changes the coefficient by 1%.

    Args:
        coef: the coefficient of the batch.
        kl: mean over the batch's responses of the KL summed over their tokens.
        samples: number of these responses.
        target: nats per response.
        horizon: responses over which the coefficient reacts; more than 0.2 * samples, so that it stays above 0.

    Raises:
        ValueError: `kl` is not finite.
    """
    if not math.isfinite(kl):
        raise ValueError(f"kl must be finite, got {kl}")
    error = min(max(kl / target - 1, -KL_ERROR_CLIP), KL_ERROR_CLIP)
    return coef * (1 + error * samples / horizon)
