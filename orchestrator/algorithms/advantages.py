"""Advantages, with a critic's values and without, and their whitening. Pure functions, no I/O.

Letters in shapes: B responses, T response tokens, right-padded. `mask` is the action mask, True at a trained
response token; what lies outside it, even NaN, changes neither a result nor a gradient. Index t is response
token t everywhere: logprobs[:, t] = log pi(y_t | prefix), values[:, t] = V(prefix). Every function but
`length_lambdas` raises ValueError if a mask is not boolean or a shape differs from the mask's.
"""

import numpy as np
import torch
from torch import Tensor

from quartet.models.numerics import VARIANCE_EPS, check_masked, masked_mean, masked_var


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, and returns = advantages + values. All [B, T], zero off the mask.

    Schulman et al. 2015 (arXiv:1506.02438), eq. 16, as a recursion from the last token backwards: delta_t =
    r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma gae_lambda A_t+1. A gap in a row's mask is stepped over.
    `gae_lambda` may differ from response to response: [B].

    After the last token V is zero, as the episode ends there, for a response that was cut at the length limit too: it
    is scored as a whole, and its score is all that it earns. ValueError if a factor is outside 0..1.
    """
    check_masked(mask, rewards=rewards, values=values)
    if isinstance(gae_lambda, Tensor):
        check_masked(mask.any(dim=1), gae_lambda=gae_lambda)
        gae_lambda = gae_lambda.to(values)
    _check_factors(gamma=gamma, gae_lambda=gae_lambda)
    # By numpy, with the numbers of one t side by side: the calls of torch, one of which each operation
    # takes, cost more than the arithmetic on a column of [B, T].
    factor = gamma * gae_lambda
    decay = factor.numpy() if isinstance(factor, Tensor) else factor
    earned = np.array(rewards.to(values).numpy().T, order="C")  # a copy, which takes the advantages
    valued, here = np.ascontiguousarray(values.numpy().T), np.ascontiguousarray(mask.numpy().T)
    carry, following = np.zeros((2, len(values)), valued.dtype)
    with np.errstate(all="ignore"):  # anything may be off the mask
        for t in reversed(range(len(here))):
            delta = earned[t] + gamma * following - valued[t]
            np.copyto(carry, delta + decay * carry, where=here[t])
            np.copyto(following, valued[t], where=here[t])
            earned[t] = carry
    advantages = torch.from_numpy(earned).T.contiguous().masked_fill_(~mask, 0.0)
    return advantages, (advantages + values).masked_fill_(~mask, 0.0)


def length_lambdas(mask: Tensor, *, alpha: float) -> Tensor:
    """A lambda for each response of T tokens: 1 - 1 / (alpha T), but at least 0. mask [B, T] -> [B] float64.

    Length-adaptive GAE (Yue et al. 2025, VAPO, arXiv:2504.05118), which SAO (arXiv:2607.07508) takes with alpha 1.5
    for the policy. The coefficients lambda^l of the terms of A_t add up to 1 / (1 - lambda) = alpha T, so that they
    reach equally far in all responses, measured by their length. With alpha 1.5 two tokens have 2/3, 100 have 0.9933.
    ValueError unless alpha > 0.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be > 0, got {alpha}")
    return (1 - 1 / (alpha * mask.sum(dim=1).clamp(min=1).double())).clamp(min=0)


def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token to the end. [B, T], zero off the mask.

    Rewards 1, 0, 4 with gamma 1/2 give 2, 2, 4. ValueError if gamma is outside 0..1.
    """
    summed, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)
    return summed


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Unit variance and zero mean over the masked batch. All [B, T], zero off the mask.

    (A - mean) / sqrt(unbiased variance + 1e-8), the mean not added back. ValueError with fewer than two tokens.
    """
    shift = masked_mean(advantages, mask)
    scale = torch.rsqrt(masked_var(advantages, mask) + VARIANCE_EPS)
    return (advantages - shift).mul_(scale).masked_fill_(~mask, 0.0)


def _check_factors(**factors: float | Tensor) -> None:
    """Raises ValueError unless every factor lies in 0..1."""
    for name, factor in factors.items():
        numbers = factor.tolist() if isinstance(factor, Tensor) else [factor]
        if not all(0 <= number <= 1 for number in numbers):
            raise ValueError(f"{name} must lie in 0..1, got {factor}")
