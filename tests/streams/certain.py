"""A policy whose weights say their version: each version makes another token certain, whatever the prompt."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.models import WORDS, make_policy

FIRST = 4
"""The first token that stands for versions; those before it are special."""
COUNT = len(WORDS) - FIRST
"""Versions until a token stands for another one again."""


def token_of(version: int) -> int:
    """The token that the weights of a version compute."""
    return FIRST + version % COUNT


def make_certain(folder: Path) -> Path:
    """Writes the policy of version 0 to a folder."""
    make_policy(folder, kind="llama", tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Nothing is added to the embeddings, which are all the same: the head alone decides.
            if name.endswith(("o_proj.weight", "down_proj.weight", "bias")):
                parameter.zero_()
            elif "norm" in name or "embed" in name:
                parameter.fill_(1.0)
    become(model, 0)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def become(model: Any, version: int) -> None:
    """Makes the model's weights those of a version."""
    head = model.lm_head.weight
    head.zero_()
    head[token_of(version)] = 1.0  # a logit of the hidden size, 64, beside zeros
