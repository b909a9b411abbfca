"""Linear layers in float32 on a CPU, computed by oneDNN where torch's own library is slower."""

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

CPUINFO = Path("/proc/cpuinfo")
LEAST_PRODUCTS = 1 << 23
"""Multiplications of a layer's call from which on oneDNN is faster: it takes a few microseconds longer to begin."""


class OneDnnLinear(nn.Linear):
    """A linear layer whose larger products in float32 are oneDNN's; all others are torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # as nn.Linear calls it
        """[..., in] -> [..., out]."""
        if _is_large(input, self.weight):
            product: torch.Tensor = _Product.apply(input, self.weight, self.bias)
            return product
        return super().forward(input)


class _Product(torch.autograd.Function):
    """input @ weight.T + bias, and its gradients. The weight's is torch's, which is as fast there."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        return multiply(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            multiply(gradient, weight.t(), None) if of_input else None,
            rows.t() @ input.reshape(-1, input.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def use_onednn(model: nn.Module, cpuinfo: Path = CPUINFO) -> None:
    """Turns the linear layers of `model` into OneDnnLinear on AMD's processors with AVX-512, which MKL, torch's
    library for float32, does not use there (`python -m benchmarks.products`). Elsewhere it does nothing."""
    if not _is_faster(cpuinfo):
        return
    for module in model.modules():
        if type(module) is nn.Linear:  # a class of another kind computes something else
            module.__class__ = OneDnnLinear


@functools.cache
def _is_faster(cpuinfo: Path) -> bool:
    # The operation has no public name, so that another torch may lack it.
    if platform.machine() != "x86_64" or not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not cpuinfo.exists():
        return False
    said = cpuinfo.read_text()
    return "AuthenticAMD" in said and "avx512f" in said.split()


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., in] -> [..., out]: input @ weight.T + bias, without a gradient; by oneDNN where OneDnnLinear would be."""
    if _is_large(input, weight) and _is_faster(CPUINFO):
        return multiply(input, weight, bias)
    return nn.functional.linear(input, weight, bias)


def _is_large(input: torch.Tensor, weight: torch.Tensor) -> bool:
    single = input.dtype == weight.dtype == torch.float32 and input.device.type == "cpu"
    return single and bool(input.numel() // weight.shape[1] * weight.numel() >= LEAST_PRODUCTS)


def multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in] -> [..., out] by oneDNN: input @ weight.T + bias. It is what torch's compiler calls on a CPU."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product
