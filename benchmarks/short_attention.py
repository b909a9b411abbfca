"""Attention over short sequences of bfloat16: by matrices, over torch's fused kernel in float32, taking turns.

    python -m benchmarks.short_attention [--rounds 30]

Prints for each length the ratio of the least times on one core, of the forward pass alone and with the backward
pass, and the relative errors of both sides' gradients against float64. On a CPU sequences of up to 512 tokens are
attended to in this way (`quartet/models/attention/short.py`).
"""

from typing import Annotated

import torch
import typer
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.products import ratio
from quartet.models.attention.short import short_attention

CONSOLE = Console()
TOKENS, HEADS, WIDTH = 2048, 8, 64
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)


def main(rounds: Annotated[int, typer.Option(min=1)] = 30) -> None:
    """Measures all lengths."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for length in LENGTHS:
        shape = (TOKENS // length, length, HEADS, WIDTH)
        # As a model's projections give them: heads inside of tokens.
        states = [torch.randn(shape).bfloat16().transpose(1, 2).requires_grad_() for _ in range(3)]
        given = torch.randn(shape).bfloat16()
        with torch.no_grad():
            forward = ratio(lambda: short_attention(*states), lambda: fused(*states), rounds)  # noqa: B023
        both = ratio(
            lambda: gradient(short_attention(*states), states, given),  # noqa: B023
            lambda: gradient(fused(*states), states, given),  # noqa: B023
            rounds,
        )
        wide = [state.detach().double().requires_grad_() for state in states]
        exact = gradient(fused(*wide), wide, given.double())
        errors = (
            error(gradient(attended, states, given), exact) for attended in (short_attention(*states), fused(*states))
        )
        told = f"{length} tokens: forward {forward:.2f}, both passes {both:.2f}, errors "
        CONSOLE.print(told + " and ".join(f"{each:.1e}" for each in errors), highlight=False)


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Torch's kernel in float32, or in float64. [N, heads, L, D] -> [N, L, heads, D] in the states' type."""
    wide = torch.promote_types(query.dtype, torch.float32)
    attended = scaled_dot_product_attention(query.to(wide), key.to(wide), value.to(wide), is_causal=True)
    return attended.transpose(1, 2).to(query.dtype)


def gradient(attended: torch.Tensor, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """The gradient of all states, as one vector."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(attended, states, given)])


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Length of the difference over that of the exact vector."""
    return float((actual.double() - exact).norm() / exact.norm())


if __name__ == "__main__":
    typer.run(main)
