"""Attention over padded rows, with a mask that is made without asking the device whether anything is padded."""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quartet.seams.transformers import attention_of, takes_attention

NAME = "padded_sdpa"
"""The name under which transformers knows the attention and its mask."""


def whole_mask(shape: tuple[int, int], device: torch.device | str) -> torch.Tensor:
    """[R, L] bool, the attention mask of rows without padding: a single number in memory, so that its strides tell
    the host that it masks nothing."""
    return torch.ones(1, 1, dtype=torch.bool, device=device).expand(shape)


def padded_mask(
    *, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **options: Any
) -> torch.Tensor | None:
    """The mask of transformers' `sdpa_mask`, which would look into `attention_mask` to see whether attention can do
    without. Here it can if the mask is a `whole_mask`."""
    if attention_mask is not None and attention_mask.stride(-1) == 0:
        attention_mask = None
    skip = allow_is_causal_skip and attention_mask is None
    mask: torch.Tensor | None = sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=skip, **options)
    return mask


def use_in(model: Any) -> None:
    """Switches a transformers model from sdpa, if it has functions for attention that can be chosen."""
    if attention_of(model) == "sdpa" and takes_attention(model):
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, padded_mask)
