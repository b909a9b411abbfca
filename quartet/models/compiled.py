"""Layers of a model compiled by torch: norms, rotations, activations and sums in few kernels instead of many."""

import os
import shutil
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from quartet.config.base import ConfigError
from quartet.models.attention import packed
from quartet.models.head import LogprobHead
from quartet.models.tiles import Kernels

COMPILERS = ("g++", "gcc", "c++", "cc", "clang++", "clang")
"""Compilers of C and C++, one of which torch needs for a CPU's kernels and for starting a GPU's."""


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Has torch compile each decoder layer of a transformers model at its first use, for any number of tokens, and
    the sums over tiles of the vocabulary in its head. Layers of one kind share what is compiled; recomputation of
    activations goes on around them.

    The plain layers are the reference: results differ from theirs by rounding, since sums of products are fused. The
    attention of packed rows stays as it is, a call between compiled parts, so that the number of sequences and their
    lengths, which the host knows, compile nothing again.

    Args:
        model: a model with layers of transformers' kind.
        backend: torch's name of the compiler.

    Raises:
        ConfigError: the model has no such layers, or mixtures of experts in them, or the machine lacks a C compiler.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        config: Any = model.config
        raise ConfigError(
            f"compile_layers: {config.model_type} has no layers of the kind that is compiled; set it to false"
        )
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        # How many tokens an expert gets is known only on the device: torch compiles each such layer in pieces, anew
        # for other numbers of tokens, and says so in thousands of lines.
        raise ConfigError("compile_layers: mixtures of experts are not compiled; set it to false")
    if not any(map(shutil.which, (os.environ.get("CXX") or "", os.environ.get("CC") or "", *COMPILERS))):
        raise ConfigError(
            "compile_layers: needs a C compiler, such as gcc, on this machine; install one, or set it to false"
        )
    AttentionInterface.register(packed.NAME, torch.compiler.disable(packed.packed_attention))
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in kinds:
            kinds[kind] = _compiled(kind, backend)
        layer.__class__ = kinds[kind]
    for module in model.modules():
        if isinstance(module, LogprobHead):
            module.kernels = Kernels.compiled(backend)


def _compiled(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    """A class of layers with a compiled forward pass.

    Not `layer.compile`: from 5.23 on transformers recomputes activations around the forward of a layer's class and
    not around its call, and torch compiles nothing of a recomputation that has a plain call, as of attention, in it.
    """
    compiled = torch.compile(kind.forward, backend=backend, dynamic=True)

    # Transformers copies the attributes of what is a class's forward, and torch would take the copy for the compiled.
    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        return compiled(self, *arguments, **options)

    return type(kind.__name__, (kind,), {"forward": forward})
