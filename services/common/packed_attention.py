"""Attention over sequences that lie one behind the other in a row, none of which sees another."""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "packed_sdpa"
"""Under which transformers knows it. Unknown to its masks, so that it makes none."""


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention (torch's fused kernel) in each sequence on its own. query [1, heads, L, D], key and value
    [1, groups, L, D], position_ids [1, L] -> [1, L, heads, D].

    A sequence begins wherever the position is 0. The cost is the sum of the squares of the lengths: a mask over the
    whole row, block by block, would cost the square of their sum. RuntimeError if the model hands no positions on,
    or there are several rows.
    """
    if position_ids is None or query.shape[0] != 1:
        raise RuntimeError("packing: this architecture's attention gets no position ids of a single row")
    ends = [*torch.nonzero(position_ids[0] == 0)[1:, 0].tolist(), query.shape[2]]
    lengths = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    split = (states.split(lengths, dim=2) for states in (query, key, value))
    pieces = [sdpa_attention_forward(module, *states, None, **options)[0] for states in zip(*split, strict=True)]
    return torch.cat(pieces, dim=1), None


def takes(model: Any) -> bool:
    """Whether every layer of a transformers model attends to its whole sequence, through a function like this one:
    not through a window, nor by a state that would run on into the next sequence."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    window = getattr(model.config, "sliding_window", None)
    return bool(model._supports_attention_backend) and set(kinds) == {"full_attention"} and window is None


AttentionInterface.register(NAME, packed_attention)
