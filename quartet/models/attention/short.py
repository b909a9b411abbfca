"""Attention over short sequences in bfloat16 on a CPU, by the whole matrix of their weights."""

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

MOST_TOKENS = 512
"""Longest sequence. Its weights, kept for the backward pass, take as much memory as the states that a fused kernel
keeps in float32 (with 64 numbers per head)."""
MOST_WEIGHTS = 1 << 22
"""Weights that take 16 MiB in float32."""


def takes(query: torch.Tensor, length: int) -> bool:
    """True for sequences of `length` tokens of bfloat16 on a CPU that multiplies it twice as fast as float32. Without
    such products torch's fused kernel in float32 is the faster one."""
    on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return on_cpu and length <= MOST_TOKENS and _multiplies_bfloat16()


@functools.cache
def _multiplies_bfloat16() -> bool:
    # oneDNN takes bfloat16 on each CPU with AVX-512, but multiplies it faster only with instructions of its own.
    # Torch's questions for these have no public names, so that another torch may lack them.
    questions = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(question() for question in questions if question)


def short_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    most_weights: int = MOST_WEIGHTS,
) -> torch.Tensor:
    """Causal attention within each of N sequences of L tokens. query [N, heads, L, D], key and value
    [N, groups, L, D] -> [N, L, heads, D].

    The scores and their softmax are in float32, the weights that multiply the values in the states' type, as in
    FlashAttention 2 (Dao 2023, algorithm 1).

    Args:
        scale: multiplies the scores; None: 1 / sqrt(D).
        most_weights: most weights at a time, unless a single sequence has more.
    """
    count, heads, length, width = query.shape
    groups, scale = key.shape[1], width**-0.5 if scale is None else scale
    at_once = max(1, most_weights // (heads * length * length))
    if count > at_once:
        parts = zip(*(states.split(at_once) for states in (query, key, value)), strict=True)
        return torch.cat([short_attention(*part, scale=scale, most_weights=most_weights) for part in parts])
    # Heads that share keys are further rows of one product with them.
    later = torch.full((length, length), -torch.inf).triu(1).repeat(heads // groups, 1)
    attended: torch.Tensor = _Attention.apply(
        query.reshape(count * groups, -1, width),
        key.reshape(count * groups, length, width),
        value.reshape(count * groups, length, -1),
        later,
        scale,
    )
    return attended.view(count, heads, length, -1).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """softmax(scale * query @ key.T + later) @ value. query [G, R, D], key and value [G, L, D], later [R, L] float32
    -> [G, R, D]."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, later: torch.Tensor, scale: float
    ) -> torch.Tensor:
        scores = torch.baddbmm(later, query.float(), key.float().transpose(1, 2), alpha=scale)
        weights = scores.softmax(-1).to(query.dtype)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale = scale
        return weights @ value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        of_weights = gradient @ value.transpose(1, 2)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        return of_scores @ key, of_scores.transpose(1, 2) @ query, weights.transpose(1, 2) @ gradient, None, None
