"""Activations that are computed again in the backward pass, so that they need not be kept."""

from typing import Any

from torch import nn

from quartet.models.scalar import ScalarModel


def recompute_activations(model: nn.Module) -> None:
    """Has each layer of a transformers model, or of a ScalarModel's body, keep its input alone."""
    body: Any = model.body if isinstance(model, ScalarModel) else model
    # The first is the name from transformers 5.23 on, where the second warns.
    enable = getattr(body, "activation_checkpointing_enable", None) or body.gradient_checkpointing_enable
    enable()
