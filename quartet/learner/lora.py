"""Low-rank adapters in a model, and the model's own weights with the adapters merged in."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from quartet.config.base import ConfigError
from quartet.config.learner import LoraConfig
from quartet.learner.tensor_parallel import whole
from quartet.models.loading import shape_of_causal

BASE = "base_layer"
"""Peft's name for the original layer inside a layer with an adapter."""
NAME = "default"
"""Peft's name for a model's only adapter."""
_ADAPTER = ".lora_"
"""Stands between the name of a layer and that of its A or B."""


def add_adapters(model: nn.Module, config: LoraConfig | None) -> nn.Module:
    """Adds adapters to the model and freezes everything else; without a config the model stays as it is.

    Raises:
        ConfigError: no layer has one of the names in `target_modules`, or one has and cannot get an adapter.
    """
    if config is None:
        return model
    import peft

    torch.manual_seed(config.seed)
    targets = "all-linear" if config.target_modules is None else list(config.target_modules)
    try:
        # Adapters are injected without peft's wrapper, so that the model keeps its class and its names.
        peft.inject_adapter_in_model(_described(model, config, targets), model)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: {error}") from None
    _check_untied(model)
    return model


def _check_untied(model: nn.Module) -> None:
    """Raises ConfigError if an adapter is on a matrix that two layers share, of which it would change one: merged, it
    would change both or neither."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for shared in names.values():
        if len(shared) > 1 and any(f".{BASE}." in name for name in shared):
            both = " and ".join(name.replace(f".{BASE}.", ".") for name in shared)
            raise ConfigError(f"lora.target_modules: {both} are one matrix, which gets no adapter; leave them out")


def _described(model: nn.Module, config: LoraConfig, targets: str | list[str], **more: Any) -> Any:
    """Peft's description of adapters on these layers of the model."""
    import peft
    from transformers.pytorch_utils import Conv1D

    transposed = any(isinstance(layer, Conv1D) for layer in model.modules())  # GPT-2's weights
    given = {"r": config.rank, "lora_alpha": config.alpha, "target_modules": targets, "fan_in_fan_out": transposed}
    return peft.LoraConfig(**given | more)


def separable(module: nn.Module) -> bool:
    """True if all that is trained are adapters that `adapters_of` gives: not with a head of its own, nor experts."""
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return all(_ADAPTER in name and _of_one_matrix(module, name) for name in trained)


def write_adapters(folder: Path, tensors: Mapping[str, torch.Tensor], module: nn.Module, config: LoraConfig) -> None:
    """Writes adapters, by the names of `adapters_of`, to a new folder in peft's format."""
    base = module.config.name_or_path
    targets = sorted(config.target_modules or {*map(adapted_layer, tensors)})
    folder.mkdir()
    described = _described(module, config, targets, task_type="CAUSAL_LM", base_model_name_or_path=base)
    described.save_pretrained(folder)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def adapters_for(folder: str, dtype: str, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Name -> A or B, without data (`meta`), of the adapters that a learner of the model in `folder` would push.

    Raises:
        ConfigError: as `add_adapters` and `adapters_of`; or the embeddings or the head have an adapter, with which no
            engine computes.
    """
    model: Any = add_adapters(shape_of_causal(folder, dtype), config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if found := [name for name, layer in model.named_modules() if layer in ends and hasattr(layer, BASE)]:
        raise ConfigError(
            f"lora.target_modules: {' and '.join(found)}: adapters of embeddings and head can only be pushed merged; "
            "leave weights.adapters out"
        )
    return {weight.name: weight.parameter for weight in adapters_of(model)}


def scaled(weights: Iterable[tuple[str, torch.Tensor]], config: LoraConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Adapters by the names of `adapters_of`, each B times alpha / rank: B A is then all that they add."""
    for name, tensor in weights:
        yield name, tensor.detach() * (config.alpha / config.rank) if f"{_ADAPTER}B" in name else tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of the model as it would be without adapters."""

    name: str
    parameter: nn.Parameter
    layer: Any = None
    """Peft's layer around the parameter, if it has an adapter."""

    @property
    def parts(self) -> list[nn.Parameter]:
        """The parameters that `merged` reads."""
        if self.layer is None:
            return [self.parameter]
        return [self.parameter, self.layer.lora_A[NAME].weight, self.layer.lora_B[NAME].weight]

    def merged(self) -> torch.Tensor:
        """The whole parameter plus its adapter, added in float32 and returned in the parameter's dtype. With tensor
        parallelism all ranks call it."""
        base = whole(self.parameter)
        if self.layer is None:
            return base
        with torch.no_grad():
            return (base.float() + self.layer.get_delta_weight(NAME).float()).to(base.dtype)


def weights_of(module: nn.Module) -> Iterator[Weight]:
    """Every parameter except the adapters, with the names and the order of the model without adapters."""
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        if _ADAPTER in name:
            continue
        layers = []
        while path.endswith(f".{BASE}"):
            path = path.removesuffix(f".{BASE}")
            layers.append(module.get_submodule(path))
        # Experts keep their weights in one module, which peft wraps once for each of its parameters.
        adapted = [layer for layer in layers if getattr(layer, "parameter_name", "weight") == last]
        yield Weight(f"{path}.{last}" if path else last, parameter, adapted[0] if adapted else None)


def adapters_of(module: nn.Module) -> Iterator[Weight]:
    """The adapters' own parameters, A [rank, in] and B [out, rank] of each layer, by the names that peft's files have
    below `base_model.model`, such as `model.layers.0.self_attn.q_proj.lora_A.weight`.

    Raises:
        ConfigError: a layer's adapter is not that of one matrix, as with experts that are in one parameter.
    """
    for name, parameter in module.named_parameters():
        if _ADAPTER in name:
            layer, _, part = name.rpartition(_ADAPTER)
            if not _of_one_matrix(module, name):
                raise ConfigError(
                    f"lora: {layer.replace(f'.{BASE}', '')} holds several matrices in one parameter, whose "
                    "adapters can only be pushed merged; leave weights.adapters out"
                )
            yield Weight(f"{layer}{_ADAPTER}{part.replace(f'.{NAME}', '')}", parameter)


def _of_one_matrix(module: nn.Module, name: str) -> bool:
    """True if the adapter's parameter of this name is on a layer's own weight."""
    layer = module.get_submodule(name.rpartition(_ADAPTER)[0])
    return bool(getattr(layer, "parameter_name", "weight") == "weight")


def is_adapter(name: str) -> bool:
    """True if this is the name of an A or B."""
    return _ADAPTER in name


def adapted_layer(name: str) -> str:
    """The last part of the name of the layer to which an A or B of `adapters_of` belongs, such as `q_proj`."""
    return name.rpartition(_ADAPTER)[0].rpartition(".")[2]
