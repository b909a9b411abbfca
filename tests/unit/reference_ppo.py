"""PPO's formulas the slow way, to check the fast way against: Python floats, one token at a time.

Responses are ragged lists, without masks or padding, and sums are written out where the fast code uses a recursion
or a fused operation. `pad` turns them into tensors with NaN wherever a token is missing.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Rows = list[list[float]]


def random_rows(seed: int, lengths: Sequence[int], scale: float = 1.0) -> Rows:
    """Normal numbers of standard deviation `scale`, one list for each length."""
    rng = random.Random(seed)
    return [[rng.gauss(0.0, scale) for _ in range(length)] for length in lengths]


def random_lengths(seed: int) -> list[int]:
    """Three to seven lengths from 1 to 9, not all the same."""
    rng = random.Random(seed)
    return [1, 9, *(rng.randint(1, 9) for _ in range(rng.randint(1, 5)))]


def pad(rows: Rows, fill: float = math.nan, dtype: torch.dtype = torch.float64) -> Tensor:
    """[B, T] with one column more than the longest row, so that every row has padding."""
    width = max(map(len, rows)) + 1
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)


def mask_of(rows: Rows) -> Tensor:
    """bool [B, T] to go with `pad`."""
    return ~pad([[0.0] * len(row) for row in rows]).isnan()


def close(actual: Tensor | float, expected: Tensor | Rows | float, tolerance: float = 1e-10) -> None:
    """Assert equal shapes, and equal numbers to a relative or absolute tolerance."""
    got, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]


def mean(rows: Rows) -> float:
    return math.fsum(flat(rows)) / len(flat(rows))


def variance(rows: Rows) -> float:
    centre = mean(rows)
    return math.fsum((x - centre) ** 2 for x in flat(rows)) / (len(flat(rows)) - 1)


def clip(x: float, low: float, high: float) -> float:
    if x < low:
        return low
    return high if x > high else x


def value_loss(new: Rows, old: Rows, returns: Rows, eps: float | None, denominator: float) -> tuple[float, float]:
    loss, clipped = 0.0, 0
    for n, o, r in zip(flat(new), flat(old), flat(returns), strict=True):
        plain = (n - r) ** 2
        other = plain if eps is None else (clip(n, o - eps, o + eps) - r) ** 2
        loss += 0.5 * max(plain, other)
        clipped += other > plain
    return loss / denominator, clipped / denominator


def explained_variance(values: Rows, returns: Rows) -> float:
    residuals = [[r - v for r, v in zip(flat(returns), flat(values), strict=True)]]
    return 1 - variance(residuals) / variance(returns)


def kl(logprob: float, ref_logprob: float, kind: str) -> float:
    r = math.exp(ref_logprob) / math.exp(logprob)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[kind]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> Rows:
    """The infinite sum of Schulman et al. 2015, eq. 16: A_t = sum over l of (gamma lam)^l delta_t+l."""
    advantages = []
    for r, v in zip(rewards, values, strict=True):
        v = [*v, 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        advantages.append(
            [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]
        )
    return advantages


def objective(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, str]:
    """PPO's objective case by case, and the bound that holds it; "" if none does and it has a gradient."""
    if advantage >= 0:
        return ((1 + high) * advantage, "high") if ratio > 1 + high else (ratio * advantage, "")
    if ratio < 1 - low:
        return (1 - low) * advantage, "low"
    if dual is not None and ratio > dual:
        return dual * advantage, "dual"
    return ratio * advantage, ""


def policy_loss(
    new: Rows,
    old: Rows,
    advantages: Rows,
    weights: Rows,
    clips: tuple[float, float, float | None],
    denominator: float,
) -> tuple[dict[str, float], list[float]]:
    """The numbers of a PolicyLoss, and d loss / d new_logprobs for each token in order."""
    sums = dict.fromkeys(("loss", "low", "high", "dual", "approx_kl", "ratio_mean"), 0.0)
    gradients, ratios = [], []
    for n, o, a, w in zip(flat(new), flat(old), flat(advantages), flat(weights), strict=True):
        ratio = math.exp(n) / math.exp(o)
        value, bound = objective(ratio, a, *clips)
        sums["loss"] -= w * value
        sums["approx_kl"] += ratio - 1 - math.log(ratio)
        sums["ratio_mean"] += ratio
        if bound:
            sums[bound] += 1
        gradients.append(0.0 if bound else -w * a * ratio / denominator)
        ratios.append(ratio)
    return {k: v / denominator for k, v in sums.items()} | {"ratio_max": max(ratios)}, gradients


def doubles(rows: Any) -> Tensor:
    """The rows as float64, in which a check by hand is exact."""
    return torch.tensor(rows, dtype=torch.float64)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """d loss / d leaf."""
    return torch.autograd.grad(loss, leaf)[0]
