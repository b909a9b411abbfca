"""A language model of about a given size, the same in every process: what scoring a probe costs beside a push."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from quartet.wire.codec import Floats, Ints

VOCABULARY, HIDDEN = 8000, 1024
MAX_LENGTH = 128


@cache
def sized(mib: int) -> Any:
    """A Llama of about `mib` MiB in float32, at least one layer."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which most processes need not spend

    shape = {"hidden_size": HIDDEN, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": VOCABULARY}
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 2816
    layers = max(1, round((mib * 2**18 - 2 * VOCABULARY * HIDDEN) / layer))
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, max_position_embeddings=MAX_LENGTH)).eval()


@torch.inference_mode()
def score(mib: int, sequences: Sequence[Ints]) -> list[Floats]:
    """Log-probs of all tokens but the first, of sequences of equal length in one pass."""
    rows = torch.stack([torch.from_numpy(row).long() for row in sequences])
    every = sized(mib)(rows).logits[:, :-1].log_softmax(-1)
    chosen = every.gather(-1, rows[:, 1:, None])[..., 0]
    return [row.numpy() for row in chosen]
