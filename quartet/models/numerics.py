"""Masked reductions, pieces of logits, entropy and the value loss: the arithmetic services and orchestrator share.

Letters in shapes: B sequences, T token positions, V vocabulary entries. A mask is boolean, True where a
token counts. Values outside it (padding, even NaN or inf) change neither a result nor a gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}  # logits worked on at a time: 64 MB and 512 MB in float32
LEAST_LOGPROB = -1e4  # in an entropy: exp of it is 0, also in float64, and a product with it never overflows
VARIANCE_EPS = 1e-8  # added to a variance: a spread far below 1e-4 counts as none


def check_masked(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless `mask` is boolean and every tensor has its shape: nothing may broadcast."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be a bool tensor, got {mask.dtype}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, should be {list(mask.shape)} like the mask")


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 if it is that already: half precision loses small terms of a sum."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _count(mask: Tensor) -> int:
    return int(mask.count_nonzero())  # a sum would make integers of all of it


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over the mask, at least in float32. x, mask [*same] -> []."""
    check_masked(mask, x=x)
    return torch.where(mask, widen(x), 0.0).sum()  # a product would let NaN * 0 = NaN through


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask. x, mask [*same] -> []. ValueError if nothing is masked in."""
    count = _count(mask)
    if count == 0:
        raise ValueError("mask is empty: a mean needs at least one True")
    return masked_sum(x, mask) / count


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance over the mask: squares about the mean over n - 1. x, mask [*same] -> [].

    ValueError with fewer than two True entries.
    """
    count = _count(mask)
    if count < 2:
        raise ValueError(f"mask has {count} True entries: an unbiased variance needs at least two")
    # In place, as a batch may be large, and before squaring: see value_loss.
    deviation = (widen(x) - masked_mean(x, mask)).masked_fill_(~mask, 0.0)
    return deviation.square().sum() / (count - 1)


def partial_mean(x: Tensor, mask: Tensor, denominator: float | Tensor) -> Tensor:
    """Masked sum over a count given from outside. x, mask [*same] -> [].

    `denominator` is the token count of the whole minibatch, over all micro-batches and ranks: their
    partial means, and the gradients of these, then add up to the full batch's. ValueError unless > 0.
    """
    if not denominator > 0:
        raise ValueError(f"denominator must be the minibatch's token count, > 0, got {denominator}")
    return masked_sum(x, mask) / denominator


def by_time(function: Callable[..., Tensor], logits: Tensor, *others: Tensor) -> Tensor:
    """`function` (logits [B, t, V], others [B, t] -> [B, t]) over pieces of the time axis, joined: [B, T].

    Large logits go piece by piece under activation checkpointing, so that neither pass holds more than one
    piece in float32; the price is computing each piece twice. Small logits go in one call.
    """
    batch, time, vocab = logits.shape
    step = max(1, CHUNK_ELEMENTS.get(logits.device.type, 2**24) // max(1, batch * vocab))
    if step >= time:
        return function(logits, *others)
    pieces = zip(*(x.split(step, dim=1) for x in (logits, *others)), strict=True)
    if torch.is_grad_enabled() and logits.requires_grad:
        done = [checkpoint(function, *p, use_reentrant=False, preserve_rng_state=False) for p in pieces]
    else:
        done = [function(*p) for p in pieces]
    return torch.cat(done, dim=1)


def check_logits(logits: Tensor, temperature: float) -> None:
    """ValueError unless logits are [B, T, V], and the temperature is more than 0 and finite."""
    if logits.dim() != 3:
        raise ValueError(f"logits must be [B, T, V], got {list(logits.shape)}")
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """ValueError unless the temperature is more than 0 and finite."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be > 0 and finite, got {temperature}: greedy has no log-probs")


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, at least in float32."""
    return widen(logits) if temperature == 1 else widen(logits) / temperature


def shannon(logprobs: Tensor) -> Tensor:
    """Shannon entropy -sum_v p log p of distributions given whole, in nats. logprobs [*any, V] -> [*any].

    Log-probs of -inf (forbidden tokens) add nothing, 0 log 0 = 0, and get no gradient.
    """
    return -(logprobs.exp() * logprobs.clamp(min=LEAST_LOGPROB)).sum(-1)


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip_eps: float | None,
    denominator: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped value loss and the share of tokens at which the clip decides. All [B, T] -> ([], []).

    Per token 0.5 max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2), as in OpenAI's PPO2 (baselines,
    2017); `value_clip_eps` None leaves out the clip. Both results are masked sums over `denominator`, see
    `partial_mean`. Where the clipped term is the larger its gradient is zero, so the second result is
    the share of tokens that do not train. ValueError if value_clip_eps <= 0, denominator <= 0, or on shapes.
    """
    check_masked(mask, new_values=new_values, values=values, returns=returns)
    if value_clip_eps is not None and not value_clip_eps > 0:
        raise ValueError(f"value_clip_eps must be > 0, or None for no clip, got {value_clip_eps}")
    # NaN is cut off before the arithmetic: masking the result alone leaves 0 * NaN in the backward pass.
    new, old, target = (torch.where(mask, widen(x), 0.0) for x in (new_values, values, returns))
    plain = (new - target).square()
    if value_clip_eps is None:
        return partial_mean(0.5 * plain, mask, denominator), plain.new_zeros(())
    clipped = (torch.clamp(new, old - value_clip_eps, old + value_clip_eps) - target).square()
    loss = partial_mean(0.5 * torch.maximum(plain, clipped), mask, denominator)
    return loss, partial_mean(clipped > plain, mask, denominator)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask. All [B, T] -> number <= 1.

    1 is a perfect critic, 0 one no better than a constant; nan when the returns do not vary.
    ValueError on an empty mask.
    """
    check_masked(mask, values=values, returns=returns)
    # Rounding can leave the variance of equal numbers above zero.
    if torch.where(mask, returns, torch.inf).min() == torch.where(mask, returns, -torch.inf).max():
        return float("nan")
    total = _consumed_squares(returns.to(torch.float64, copy=True), mask)
    return float(1 - _consumed_squares(returns.to(torch.float64, copy=True).sub_(values), mask) / total)


def _consumed_squares(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of squares about the mean over the mask. Computed in `x` itself, as one more copy of a batch may be
    large."""
    count = _count(mask)
    if count == 0:
        raise ValueError("mask is empty: a variance needs at least one True")
    mean = x.masked_fill_(~mask, 0.0).sum() / count
    return x.sub_(mean).masked_fill_(~mask, 0.0).square_().sum()
