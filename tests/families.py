"""Published architectures in miniature: random models, each with the quirks by which its family differs.

Hidden size 64 and two layers, the tokenizer of tests/models.py unless the quirk is the tokenizer's. Head sizes are
those that vLLM's CPU attention takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from tests.models import BOS, EOS, MAX_LENGTH, PAD, ROWS, WORDS, make_tokenizer

ENDS = [EOS, 5, 6]
"""Several ends of a text, as in chat models."""


@dataclass(frozen=True, slots=True)
class Family:
    """Makes models of one architecture."""

    kind: str
    """`model_type` of its configuration."""
    options: dict[str, Any]
    """Options of its configuration, under its own names."""
    ends: list[int] | int = EOS
    """`eos_token_id` of its generation configuration."""
    tokenizer: Callable[[], PreTrainedTokenizerFast] = make_tokenizer
    packs: bool = True
    """The attention takes packed sequences."""

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Writes a language model with random weights and its tokenizer to `folder`; returns `folder`."""
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config())
        model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=self.ends)
        return self._save(model, folder)

    def make_reward(self, folder: Path, seed: int = 0) -> Path:
        """Writes a reward model of one label."""
        torch.manual_seed(seed)
        return self._save(AutoModelForSequenceClassification.from_config(self.config(num_labels=1)), folder)

    def config(self, **more: Any) -> Any:
        """The configuration of a model, with `more` options."""
        ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": self.ends}
        return AutoConfig.for_model(self.kind, **{"vocab_size": ROWS} | ids | self.options | more)

    def _save(self, model: Any, folder: Path) -> Path:
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too: none can be mislaid without being missed
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
        return folder


def make_unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's way: pieces with scores, a blank written as part of the word after it."""
    pieces = [(word, 0.0) for word in WORDS[:4]]
    pieces += [(f"▁w{index}", -float(index)) for index in range(4, 60)] + [("▁", -8.0), ("w", -9.0), ("1", -9.0)]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("2", -9.0)], unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
    )


def make_plain_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of tests/models.py, but nothing goes before a text."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

FAMILIES = {
    "llama3": Family("llama", _SHAPE | _HEADS | {"rope_parameters": _LLAMA3_ROPE}, ends=ENDS),
    "qwen2.5": Family("qwen2", _SHAPE | {"tie_word_embeddings": True}),
    "qwen3": Family("qwen3", _SHAPE | _HEADS, tokenizer=make_plain_tokenizer),
    "qwen3-moe": Family(
        "qwen3_moe",
        _SHAPE
        | _HEADS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma2": Family(
        "gemma2",
        _SHAPE | _HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        ends=ENDS[:2],
        packs=False,
    ),
    "gemma3": Family(
        "gemma3_text",
        _SHAPE
        | _HEADS
        | {
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        packs=False,
    ),
    "phi3": Family("phi3", _SHAPE | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}, ends=ENDS),
    "mistral": Family("mistral", _SHAPE | _HEADS | {"sliding_window": 16}, packs=False),
    "gpt2": Family(
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_LENGTH, "initializer_range": 0.1},
        tokenizer=make_plain_tokenizer,
    ),
    "opt": Family(
        "opt",
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
            "word_embed_proj_dim": 64,
            "init_std": 0.1,
            "dropout": 0.1,
        },
    ),
    "gpt-neox": Family(
        "gpt_neox",
        _SHAPE | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    ),
    "olmo2": Family("olmo2", _SHAPE),
    "unigram": Family("llama", _SHAPE | {"tie_word_embeddings": True}, tokenizer=make_unigram),
    "bos": Family("llama", _SHAPE),
}
"""Families by name. `bos` is the one whose tokenizer puts a token before each text by itself."""
