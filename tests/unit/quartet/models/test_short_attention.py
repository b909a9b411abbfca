"""Attention by the matrix of its weights, against torch's in float64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quartet.models.attention import short
from quartet.models.linear import CPUINFO

COUNT, HEADS, GROUPS, LENGTH, WIDTH = 5, 6, 2, 37, 16


def states() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(COUNT, heads, LENGTH, WIDTH).bfloat16() for heads in (HEADS, GROUPS, GROUPS)]


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual.double() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("at_once", [1, 2, COUNT])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_gradients_are_exact_to_bfloat16(scale: float | None, at_once: int) -> None:
    """Bfloat16 rounds by one part in 512 at most, 2e-3. Torch's fused kernel has errors of the same size in it."""
    half = [state.requires_grad_() for state in states()]
    wide = [state.detach().double().requires_grad_() for state in half]
    actual, expected = (
        short.short_attention(*half, scale=scale, most_weights=at_once * HEADS * LENGTH**2),
        exact(*wide, scale=scale),
    )
    assert actual.shape == (COUNT, LENGTH, HEADS, WIDTH)
    assert error(actual, expected) < 4e-3
    weights = torch.randn(actual.shape).bfloat16()
    gradients = torch.autograd.grad(actual, half, weights)
    for one, other in zip(gradients, torch.autograd.grad(expected, wide, weights.double()), strict=True):
        assert error(one, other) < 5e-3


def test_large_scores_are_not_rounded_to_bfloat16() -> None:
    """Scores near 200 would be rounded to 1 in bfloat16, and weights be wrong by a factor of e."""
    query, key, value = states()
    query, key = query * 0.1 + 5, key * 0.1 + 10  # scores of 16 * 50 / 4 = 200, apart by some 3
    assert error(short.short_attention(query, key, value), exact(*(x.double() for x in (query, key, value)))) < 4e-3


def test_only_short_sequences_of_bfloat16_on_a_cpu_are_taken() -> None:
    query = states()[0]
    flags = CPUINFO.read_text() if CPUINFO.exists() else ""
    assert short.takes(query, short.MOST_TOKENS) == ("avx512_bf16" in flags or "amx_bf16" in flags)
    assert not short.takes(query, short.MOST_TOKENS + 1)
    assert not short.takes(query.float(), LENGTH)
    assert not short.takes(query.to("meta"), LENGTH)
