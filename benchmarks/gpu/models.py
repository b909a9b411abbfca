"""Models of known shapes with random weights: speed does not depend on what they say.

    python -m benchmarks.gpu.models FOLDER [--size 0.5B] [--dtype bfloat16]

writes a policy and a reward model, `FOLDER/policy` and `FOLDER/reward`. Their tokenizer has 271 tokens fewer than
they have rows, as Qwen2.5's, so that the engine masks padding as it does with published models.
"""

import os
import shutil
import string
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from benchmarks.figures import KEPT

SIZES = {
    "tiny": (512, 64, 128, 2, 2, 1, True),
    "0.5B": (151_936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151_936, 1536, 8960, 28, 12, 2, True),
    "3B": (151_936, 2048, 11_008, 36, 16, 2, True),
    "7B": (152_064, 3584, 18_944, 28, 28, 4, False),
}
"""Qwen2.5's, and one to try the scripts with: words, width, width of the MLP, layers, heads, groups, tied."""
PADDING = 271
"""Rows of the embeddings that no token has."""
PAD, EOS = 0, 1
LETTERS = string.ascii_letters


def shape(size: str) -> Qwen2Config:
    """The configuration of a size."""
    words, hidden, intermediate, layers, heads, groups, tied = SIZES[size]
    return Qwen2Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def tokens(size: str) -> int:
    """Number of tokens that the tokenizer of a size knows; their ids are the first."""
    return int(shape(size).vocab_size) - PADDING


def make(folder: Path, size: str, dtype: str = "bfloat16", *, reward: bool = False, seed: int = 0) -> Path:
    """Writes one with its tokenizer to `folder`, or links to that of an earlier stage; returns `folder`."""
    if KEPT not in os.environ:
        return _made(folder, size, dtype, reward, seed)
    kept = Path(os.environ[KEPT], f"{size}-{dtype}-{'reward' if reward else 'policy'}-{seed}")
    if not kept.exists():
        unfinished = kept.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        _made(unfinished, size, dtype, reward, seed).rename(kept)
    folder.mkdir(parents=True, exist_ok=True)
    for file in kept.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def _made(folder: Path, size: str, dtype: str, reward: bool, seed: int) -> Path:
    torch.manual_seed(seed)
    config = shape(size)
    config.num_labels = 1
    kind = Qwen2ForSequenceClassification if reward else Qwen2ForCausalLM
    # Initialised on the GPU where there is one: normal numbers for 1.5B parameters take a minute on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = kind(config).to(getattr(torch, dtype))
    model.cpu().save_pretrained(folder)
    if torch.cuda.is_available():
        # The processes that are measured need the memory, which torch keeps otherwise as long as this one lives.
        torch.cuda.empty_cache()
    tokenizer(tokens(size)).save_pretrained(folder)
    return folder


def tokenizer(words: int) -> PreTrainedTokenizerFast:
    """One token per letter of a text; the other tokens occur in no text. Of the kind that Qwen 2's tokenizer is, as
    which transformers loads it."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{letter: 2 + index for index, letter in enumerate(LETTERS)}}
    vocabulary |= {f"<{index}>": index for index in range(len(vocabulary), words)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>")


def main(
    folder: Path,
    size: Annotated[str, typer.Option(help=", ".join(SIZES))] = "0.5B",
    dtype: str = "bfloat16",
) -> None:
    """Runs the benchmark and prints its results."""
    make(folder / "policy", size, dtype)
    make(folder / "reward", size, dtype, reward=True)


if __name__ == "__main__":
    typer.run(main)
