"""A Llama small enough to train on two CPU cores in a minute."""

from pathlib import Path

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.common.shape import Shape
from recipes.common.tokenizer import BOS_ID, EOS_ID, PAD_ID

MAX_LENGTH = 128
"""Positions of the model: prompt and response together, in tokens."""


def tiny_config(vocabulary: int, shape: Shape) -> LlamaConfig:
    """Configuration for a tokenizer of `vocabulary` entries.

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
    )


def tiny_policy(vocabulary: int, shape: Shape) -> LlamaForCausalLM:
    """A policy with random weights (torch's global generator) and the three special ids in its settings."""
    policy = LlamaForCausalLM(tiny_config(vocabulary, shape))
    policy.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return policy


def write_tiny(folder: Path, tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Path:
    """Writes a `tiny_policy` and its tokenizer; returns the folder."""
    tiny_policy(len(tokenizer), shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_tiny(folder: Path) -> LlamaForCausalLM:
    """The policy in a folder, for sampling."""
    policy: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()
    return policy
