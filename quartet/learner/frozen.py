"""Weights of a model that are not trained."""

from torch import nn

from quartet.config.base import ConfigError

ATTENTION = "Attention"
"""End of the names of transformers' classes of attention layers, in all architectures."""


def freeze_attention(model: nn.Module) -> None:
    """Freezes the weights of all attention layers: projections, and norms within them.

    Raises:
        ConfigError: the model has no layer of such a class.
    """
    layers = [module for module in model.modules() if type(module).__name__.endswith(ATTENTION)]
    if not layers:
        raise ConfigError(
            f"freeze_attention: the model has no layer whose class is called ...{ATTENTION}; leave it out"
        )
    for layer in layers:
        layer.requires_grad_(False)
