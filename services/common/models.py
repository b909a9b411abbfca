"""Loading Hugging Face models, and the forward passes that the services and the learner share."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import is_flash_attn_2_available

from services.common import packed_attention
from services.common.config import ConfigError
from services.common.sequences import PairTensors


def default_device() -> torch.device:
    """The process's GPU where it has one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_causal(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> nn.Module:
    """The language model in `path`, to be called on packed pairs if `packing`.

    ConfigError if the folder holds none that loads, on unknown attention, or if it cannot take packed pairs.
    """
    return _load(AutoModelForCausalLM, path, dtype, attention, packing)


def load_body(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> nn.Module:
    """The model in `path` without its head. ConfigError as for load_causal."""
    return _load(AutoModel, path, dtype, attention, packing)


def _load(kind: Any, path: str, dtype: str, attention: str = "sdpa", packing: bool = False) -> nn.Module:
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError(
            "attn_implementation: flash_attention_2 wants an NVIDIA GPU and the package flash-attn, and this process "
            "has not both; sdpa runs anywhere"
        )
    # FlashAttention finds the sequences of a row by their positions itself.
    taken = packed_attention.NAME if packing and attention == "sdpa" else attention
    try:
        model: nn.Module = kind.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=taken)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model: {path} cannot be loaded as {kind.__name__}: {error}") from None
    if packing and not packed_attention.takes(model):
        raise ConfigError(f"packing: {path} has layers without plain causal attention; set packing to false")
    return model


def load_tokenizer(path: str) -> Any:
    """The tokenizer in `path`. ConfigError if the folder holds none that loads."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer: {path} holds no tokenizer that loads: {error}") from None
    # For some architectures transformers makes up an empty tokenizer where the folder holds none.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"tokenizer: {path} holds no tokenizer; its files belong beside the model's")
    return tokenizer


def max_length(model: nn.Module) -> int:
    """Longest sequence the model takes, in tokens."""
    return int(getattr(model.config, "max_position_embeddings", 1 << 30))  # type: ignore[arg-type]


def response_logits(model: Any, pairs: PairTensors) -> torch.Tensor:
    """[R, C, V]: in each column the logits that predict its response token."""
    logits: torch.Tensor = model(**pairs.inputs, logits_to_keep=pairs.predictors, use_cache=False).logits
    return logits


class ScalarModel(nn.Module):
    """A transformer body with a linear head that gives one number per token: a reward or a value model."""

    def __init__(self, body: nn.Module, bias: bool) -> None:
        super().__init__()
        self.body = body
        self.config = body.config
        width = int(body.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.head = nn.Linear(width, 1, bias=bias, dtype=next(body.parameters()).dtype)
        # Near zero, not zero: the first values are small and the body gets a gradient from the first step.
        nn.init.normal_(self.head.weight, std=1 / (width + 1))
        if bias:
            nn.init.zeros_(self.head.bias)

    def forward(self, pairs: PairTensors) -> torch.Tensor:
        """[R, L] float32, the head's output at every token."""
        hidden = self.body(**pairs.inputs, use_cache=False).last_hidden_state
        scalars: torch.Tensor = self.head(hidden).squeeze(-1).float()
        return scalars

    def gradient_checkpointing_enable(self) -> None:
        """As the body's own."""
        self.body.gradient_checkpointing_enable()  # type: ignore[operator]

    def values(self, pairs: PairTensors) -> torch.Tensor:
        """[R, C]: in each column the value of the prefix before its response token."""
        return self(pairs)[:, pairs.predictors]

    def scores(self, pairs: PairTensors) -> torch.Tensor:
        """[B]: the output at each response's last token. The pairs are padded."""
        last = pairs.action_mask.sum(1) - 1
        return self(pairs)[:, -pairs.width :].gather(1, last[:, None])[:, 0]


def load_scalar(path: str, dtype: str) -> ScalarModel:
    """A sequence-classification model of one label as a ScalarModel. ConfigError where it has no linear head."""
    full: Any = _load(AutoModelForSequenceClassification, path, dtype)
    head = getattr(full, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(f"model: {path} has no linear `score` head; causal architectures have one")
    model = ScalarModel(getattr(full, full.base_model_prefix), bias=head.bias is not None)
    model.head.load_state_dict(head.state_dict())
    return model
