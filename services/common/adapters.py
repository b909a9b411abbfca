"""Low-rank adapters in a model, and the model's own weights with the adapters merged in."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from services.common.config import ConfigError
from services.common.learner_config import LoraConfig
from services.common.tensor_parallel import whole

GATHER_BYTES = 64 << 20
"""ZeRO 3: weights are gathered in buckets of about this size."""
NAME = "default"
"""Peft's name for a model's only adapter."""


def add_adapters(model: nn.Module, config: LoraConfig | None) -> nn.Module:
    """The model with adapters, everything else frozen; untouched without a config.

    Raises:
        ConfigError: no layer has one of the names in `target_modules`.
    """
    if config is None:
        return model
    import peft

    torch.manual_seed(config.seed)
    targets = "all-linear" if config.target_modules is None else list(config.target_modules)
    try:
        # Without peft's wrapper around the model, so that it keeps its class and its names.
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets), model
        )
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: {error}") from None
    return model


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the model as it would be without adapters."""

    name: str
    parameter: nn.Parameter
    layer: Any = None
    """Peft's layer around it, if it has an adapter."""

    @property
    def parts(self) -> list[nn.Parameter]:
        """What `merged` needs."""
        if self.layer is None:
            return [self.parameter]
        return [self.parameter, self.layer.lora_A[NAME].weight, self.layer.lora_B[NAME].weight]

    def merged(self) -> torch.Tensor:
        """The parameter, whole, its adapter added: in float32, then in the parameter's dtype. With tensor parallelism
        all ranks call it."""
        base = whole(self.parameter)
        if self.layer is None:
            return base
        with torch.no_grad():
            return (base.float() + self.layer.get_delta_weight(NAME).float()).to(base.dtype)


def weights_of(module: nn.Module) -> Iterator[Weight]:
    """Every parameter, adapters left out, under the names and in the order of the model without adapters."""
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        if ".lora_" in name:
            continue
        if path.endswith(".base_layer"):
            owner = path.removesuffix(".base_layer")
            yield Weight(f"{owner}.{last}", parameter, module.get_submodule(owner) if last == "weight" else None)
        else:
            yield Weight(name, parameter)


def weight_buckets(module: nn.Module) -> Iterator[list[Weight]]:
    """Under ZeRO 3: the weights in groups of about GATHER_BYTES."""
    bucket: list[Weight] = []
    size = 0
    for weight in weights_of(module):
        bucket.append(weight)
        size += weight.parameter.ds_numel * weight.parameter.element_size()
        if size >= GATHER_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
