"""Models that fit a test: 64 words, 335 rows, hidden size 64, two heads of 32 (vLLM's CPU attention wants no less),
two layers.

Their weights are wide and their biases and norms random, so that logits differ clearly between tokens and no
parameter can be mislaid without changing the output. Imported as `tests.models`: a plain `models` would be the
demo's folder of that name.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

PAD, BOS, EOS, UNK = range(4)
WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(4, 64)))
ROWS = len(WORDS) + 271
"""Rows of the embeddings and the head: more than tokens, as in published models (Qwen 2.5: 271 more)."""
MAX_LENGTH = 128
REWARD_MEAN, REWARD_STD = 0.25, 2.0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word between blanks, `w17` is id 17; `<bos>` goes before a text."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_policy(
    folder: Path, *, kind: Literal["llama", "qwen2", "qwen3"], tied: bool, seed: int = 0, **shape: int
) -> Path:
    """Writes a language model with random weights and its tokenizer to `folder`; returns `folder`.

    `shape` replaces entries of the configuration, such as num_hidden_layers.
    """
    torch.manual_seed(seed)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**_shape() | shape, tie_word_embeddings=tied))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 32} | _shape() | shape, tie_word_embeddings=tied))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**_shape() | shape, tie_word_embeddings=tied))
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    return _save(model, folder)


def make_reward(folder: Path, seed: int = 0, *, labels: int = 1) -> Path:
    """Writes a reward model of one label whose scores are normalised by REWARD_MEAN and REWARD_STD."""
    torch.manual_seed(seed)
    config = LlamaConfig(**_shape(), num_labels=labels, reward_mean=REWARD_MEAN, reward_std=REWARD_STD)
    return _save(LlamaForSequenceClassification(config), folder)


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": ROWS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.1,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def _save(model: Any, folder: Path) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
