"""Loading Hugging Face models, and the forward passes that the services and the learner share."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import is_flash_attn_2_available

from services.common import packed_attention
from services.common.config import ConfigError
from services.common.sequences import PairTensors

VALUE_HEAD = "value_head"
"""A saved critic's head: its file is `<this>.safetensors`, its tensors `<this>.weight` and `<this>.bias`."""


def load_causal(
    path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False, spread: bool = False
) -> nn.Module:
    """The language model in `path`, in host memory, or with `spread` its layers over the GPUs that there are.

    Spread, it takes its inputs on the first GPU, gives its outputs there, and computes on one GPU after the other.
    With `packing` it is to be called on packed pairs.

    Raises:
        ConfigError: the folder holds none that loads, the attention is unknown, or it cannot take packed pairs.
    """
    return _load(AutoModelForCausalLM, path, dtype, attention, packing, "auto" if spread else None)


def load_body(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> nn.Module:
    """The model in `path` without its head. ConfigError as for load_causal."""
    return _load(AutoModel, path, dtype, attention, packing)


def _load(
    kind: Any, path: str, dtype: str, attention: str = "sdpa", packing: bool = False, devices: str | None = None
) -> nn.Module:
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError(
            "attn_implementation: flash_attention_2 wants an NVIDIA GPU and the package flash-attn, and this process "
            "has not both; sdpa runs anywhere"
        )
    # FlashAttention finds the sequences of a row by their positions itself.
    taken = packed_attention.NAME if packing and attention == "sdpa" else attention
    try:
        model: nn.Module = kind.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=taken, device_map=devices
        )
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


def load_value(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> ScalarModel:
    """The body of the model in `path` as a value model: with the head that a critic saved there, else a new one.

    Raises:
        ConfigError: the model does not load, or the head beside it does not fit it.
    """
    model = ScalarModel(load_body(path, dtype, attention, packing=packing), bias=True)
    file = Path(path) / f"{VALUE_HEAD}.safetensors"
    if not file.exists():
        return model
    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model: {file} cannot be read: {error}") from None
    wanted = {f"{VALUE_HEAD}.{name}": tensor for name, tensor in model.head.state_dict().items()}
    found, fitting = _shapes(saved), _shapes(wanted)
    if found != fitting:
        raise ConfigError(f"model: {file} holds {found}, but the body beside it takes {fitting}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(saved[name])
    return model


def _shapes(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(tensors[name].shape)}" for name in sorted(tensors)) or "nothing"
