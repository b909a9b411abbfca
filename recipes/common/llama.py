"""A Llama small enough to train on two CPU cores in a minute."""

from typing import Any

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from recipes.common.shape import Shape
from recipes.common.tokenizer import BOS_ID, EOS_ID, PAD_ID

MAX_LENGTH = 128
"""Positions of the model: prompt and response together, in tokens."""


def tiny_config(vocabulary: int, shape: Shape, **overrides: Any) -> LlamaConfig:
    """Configuration for a tokenizer of `vocabulary` entries; `overrides` go to LlamaConfig as they are.

    Embeddings are not tied: a weight push then has no hidden second copy to keep in step.
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        **overrides,
    )


def tiny_policy(vocabulary: int, shape: Shape) -> LlamaForCausalLM:
    """A policy with random weights (torch's global generator) and the three special ids in its settings."""
    policy = LlamaForCausalLM(tiny_config(vocabulary, shape))
    policy.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return policy
