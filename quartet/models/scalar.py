"""Models with one number per position: reward models and critics."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from quartet.config.base import ConfigError
from quartet.models.loading import _load, check_whole, load_config
from quartet.models.numerics import widen
from quartet.models.reading import reading
from quartet.models.sequences import PairTensors
from quartet.models.sharing import take

HEAD = "score"
"""Name of the head in transformers' sequence-classification models of causal architectures."""
VALUE_HEAD = "value_head"
"""A saved critic's head: its file is `<this>.safetensors`, its tensors `<this>.weight` and `<this>.bias`."""


class ScalarModel(nn.Module):
    """A transformer body with a linear head that gives one number per token: a reward or a value model."""

    def __init__(self, body: nn.Module, bias: bool) -> None:
        super().__init__()
        self.body = body
        self.config = body.config
        width = _width(body.config)
        self.head = nn.Linear(width, 1, bias=bias, dtype=next(body.parameters()).dtype)
        # Near zero but not zero: the first values are small, and the body gets a gradient from the first step on.
        nn.init.normal_(self.head.weight, std=1 / (width + 1))
        if bias:
            nn.init.zeros_(self.head.bias)

    def forward(self, pairs: PairTensors) -> torch.Tensor:
        """[R, L], the head's output at every token, at least in float32."""
        hidden = self.body(**pairs.inputs, use_cache=False).last_hidden_state
        return widen(self.head(hidden).squeeze(-1))


def outputs_of(model: Any, pairs: PairTensors) -> torch.Tensor:
    """[R, C]: in each column a ScalarModel's output at that response token, which `pairs` have to hold to the last;
    of the last one of a response it is the score."""
    outputs: torch.Tensor = model(pairs)[:, pairs.tokens]
    return outputs


def values_of(model: Any, pairs: PairTensors) -> torch.Tensor:
    """[R, C]: in each column the value of the prefix before its response token, by a ScalarModel."""
    values: torch.Tensor = take(model(pairs), pairs.predictors)
    return values


def scores_of(model: Any, pairs: PairTensors) -> torch.Tensor:
    """[B]: a ScalarModel's output at each response's last token, which `pairs` have to hold."""
    scalars: torch.Tensor = model(pairs)
    if pairs.ends is not None:
        return scalars[0, pairs.ends]
    last = pairs.action_mask.sum(1) - 1
    return scalars[:, -pairs.width :].gather(1, last[:, None])[:, 0]


def _width(config: Any) -> int:
    """Numbers per token that a body gives."""
    text = config.get_text_config()
    # OPT's last layer goes back to the width of its embeddings, which in opt-350m is half of the layers'.
    return int(getattr(text, "word_embed_proj_dim", text.hidden_size))


def load_scalar(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> ScalarModel:
    """A sequence-classification model of one label as a ScalarModel. ConfigError if it has no linear head, or with
    `packing` if its attention cannot keep packed pairs apart."""
    full: Any = _load(AutoModelForSequenceClassification, path, dtype, attention, packing)
    head = _head(full, path)
    model = _scalar(full, head)
    model.head.load_state_dict(head.state_dict())
    return model


def load_reward(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> ScalarModel:
    """The reward model to train from `path`: a sequence-classification model as it is, or the body of another one,
    such as a language model, under a new head. ConfigError as for `load_scalar`; of the second only the head may be
    missing."""
    if any("SequenceClassification" in name for name in load_config(path).architectures or ()):
        return load_scalar(path, dtype, attention, packing=packing)
    new = (f"{HEAD}.weight",)
    full: Any = _load(AutoModelForSequenceClassification, path, dtype, attention, packing, new=new, num_labels=1)
    return _scalar(full, _head(full, path))


def _scalar(full: Any, head: nn.Linear) -> ScalarModel:
    return ScalarModel(getattr(full, full.base_model_prefix), bias=head.bias is not None)


def write_reward(model: ScalarModel, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Writes a sequence-classification model of one label, which `load_scalar` reads.

    Args:
        model: the model, whose configuration is written.
        folder: the folder.
        weights: those of a ScalarModel by name, `body...` and `head...`.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    with torch.device("meta"):
        full: Any = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    names = {"body": full.base_model_prefix, "head": HEAD}
    parts = ((name.partition("."), tensor) for name, tensor in weights.items())
    state = {f"{names[part]}.{rest}": tensor.detach().cpu() for (part, _, rest), tensor in parts}
    full.save_pretrained(folder, state_dict=state)


def check_scalar(path: str) -> None:
    """Raises ConfigError unless `path` holds a whole sequence-classification model of one label; reads no weights."""
    _head(check_whole(AutoModelForSequenceClassification, path), path)


def _head(full: Any, path: str) -> nn.Linear:
    head = getattr(full, HEAD, None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"model: {path} has no linear `score` head; causal architectures have one")
    if head.out_features != 1:
        raise ConfigError(f"model: {path} has num_labels {head.out_features}; it must have 1")
    return head


def load_value(path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False) -> ScalarModel:
    """The body of the model in `path` as a value model, with the head that a critic saved there or else a new one.

    Raises:
        ConfigError: the model does not load, or the head beside it does not fit it.
    """
    model = ScalarModel(_load(AutoModel, path, dtype, attention, packing), bias=True)
    file = Path(path) / f"{VALUE_HEAD}.safetensors"
    if not file.exists():
        return model
    with reading(f"model: {file} cannot be read"):
        saved = load_file(file)
    wanted = {f"{VALUE_HEAD}.{name}": tensor for name, tensor in model.head.state_dict().items()}
    held, fitting = _shapes(saved), _shapes(wanted)
    if held != fitting:
        raise ConfigError(f"model: {file} holds {held}, but the body beside it takes {fitting}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(saved[name])
    return model


def write_value(model: ScalarModel, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Writes a value model, body and head, which `load_value` reads; the arguments are those of `write_reward`."""
    parts: dict[str, dict[str, torch.Tensor]] = {"body": {}, "head": {}}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor.detach().cpu()
    model.body.save_pretrained(folder, state_dict=parts["body"])  # type: ignore[operator]
    head = {f"{VALUE_HEAD}.{name}": tensor for name, tensor in parts["head"].items()}
    save_file(head, folder / f"{VALUE_HEAD}.safetensors")


def _shapes(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {list(tensors[name].shape)}" for name in sorted(tensors)) or "nothing"
