"""Loading Hugging Face models and tokenizers. Code that lies in their folders is never run, nor asked about."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    is_flash_attn_2_available,
    logging,
)

from quartet.config.base import ConfigError
from quartet.models.attention import packed, padded
from quartet.models.head import answer_in_head
from quartet.models.reading import check_sizes, reading
from quartet.seams.torch import dropouts

_KERNELS = ("_attn_implementation", "_experts_implementation")
"""Properties of a configuration that name code: part of transformers, or with a slash a repository of a hub."""


def load_causal(
    path: str, dtype: str, attention: str = "sdpa", *, packing: bool = False, spread: bool = False
) -> nn.Module:
    """The language model in `path`, in host memory; with `spread`, its layers divided over all visible GPUs.

    A spread model takes its inputs and gives its outputs on the first GPU, and computes on one GPU after the other.
    A model loaded with `packing` is called on packed pairs. It answers questions in its head (`answer_in_head`).

    Raises:
        ConfigError: the folder holds no language model that loads, the attention is unknown, or the model cannot take
            packed pairs.
    """
    model = _load(AutoModelForCausalLM, path, dtype, attention, packing, "auto" if spread else None)
    answer_in_head(model)
    return model


def load_config(path: str) -> Any:
    """The config.json in `path` as transformers reads it.

    Raises:
        ConfigError: it cannot be read, asks for too many layers or other parts, is of an architecture that only code
            in the folder knows, or names attention whose code transformers would download.
    """
    check_sizes(path)
    with reading(f"model: {path} holds no config.json of a model that transformers knows"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        names = [getattr(part, key, None) for part in parts for key in _KERNELS]
    if named := next((name for name in names if "/" in str(name)), None):
        raise ConfigError(f"model: {path}/config.json names the code {named} of a model hub; it is never run")
    return config


def shape_of_causal(path: str, dtype: str) -> nn.Module:
    """The language model in `path` without the data of its weights (on torch's `meta` device): their names, shapes
    and ties. ConfigError if the folder describes no language model."""
    config = load_config(path)
    with reading(f"model: {path} does not describe a language model"), torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=False
        )
    return model


def _load(
    kind: Any,
    path: str,
    dtype: str,
    attention: str,
    packing: bool,
    devices: str | None = None,
    *,
    new: Sequence[str] = (),
    **entries: Any,
) -> nn.Module:
    """The model in `path`, in whose files the weights `new` may be missing; `entries` replace those of its
    configuration."""
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError(
            "attn_implementation: flash_attention_2 needs an NVIDIA GPU and the package flash-attn, which this "
            "process does not both have; sdpa runs anywhere"
        )
    # FlashAttention itself finds a row's sequences by their positions.
    taken = packed.NAME if packing and attention == "sdpa" else attention
    if attention == "sdpa" and packed.caps(load_config(path)):
        taken = "eager"
    options = {"dtype": getattr(torch, dtype), "attn_implementation": taken, "device_map": devices}
    with _quiet() if new else nullcontext():  # transformers advises to train what is new, as is about to happen
        model = _whole(kind, path, new=new, **options, **entries)
    if packing and (problem := packed.problem(model, path, attention)):
        raise ConfigError(f"packing: {problem}")
    padded.use_in(model)
    return without_dropout(model)


def check_whole(kind: Any, path: str) -> nn.Module:
    """Raises ConfigError unless `path` holds all weights of a model of this class of transformers, in their shapes.
    Returns the model without its weights: only their names and shapes are read."""
    with _quiet():
        return _whole(kind, path, _headers(path), device_map="meta")


def _headers(path: str) -> dict[str, torch.Tensor] | None:
    """The tensors of the safetensors files in `path` without their data; None if the weights are in another format.
    transformers would map whole files, for which a machine needs as much free memory."""
    root, names = Path(path), [SAFE_WEIGHTS_NAME]
    found = {}
    with reading(f"model: the weights of {path} cannot be read"):
        if not (root / SAFE_WEIGHTS_NAME).exists():
            if not (root / SAFE_WEIGHTS_INDEX_NAME).exists():
                return None
            names = sorted(set(json.loads((root / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"].values()))
        for name in names:
            with safe_open(root / name, framework="pt", backend="pread") as file:
                for key in file.keys():  # noqa: SIM118
                    held = file.get_slice(key)
                    dtype = str_to_torch_dtype[held.get_dtype()]
                    found[key] = torch.empty(held.get_shape(), dtype=dtype, device="meta")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from printing progress and reports meanwhile."""
    verbosity, draws = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if draws:
            logging.enable_progress_bar()


def _whole(
    kind: Any,
    path: str,
    headers: dict[str, torch.Tensor] | None = None,
    *,
    new: Sequence[str] = (),
    **options: Any,
) -> nn.Module:
    """The model in `path`; with `headers`, of these tensors instead of those in its files. transformers would make up
    weights that are missing or have another shape, which the weights `new` alone may be."""
    config = load_config(path)
    source: Any = kind
    place: str | None = path
    with reading(f"model: {path} cannot be loaded as {kind.__name__}"):
        if headers is not None and getattr(config, "transformers_weights", None) is None:
            with torch.device("meta"):
                source = type(kind.from_config(config, trust_remote_code=False))
            place, options = None, options | {"config": config, "state_dict": headers}
        model, told = source.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False, **options
        )
        if place is None and model.can_generate() and (Path(path) / GENERATION_CONFIG_NAME).exists():
            GenerationConfig.from_pretrained(path)
    found: nn.Module = model
    if missing := sorted({*told["missing_keys"]} - {*new}):
        raise ConfigError(
            f"model: {path} lacks {_some(missing)}, which would be random; it should hold all weights of "
            f"{type(model).__name__}"
        )
    if others := [f"{name} {list(held)}" for name, held, _ in sorted(told["mismatched_keys"])]:
        raise ConfigError(f"model: {path} holds {_some(others)}, of another shape than its config.json says")
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def without_dropout(model: nn.Module) -> nn.Module:
    """Turns off all dropout in the model, so that it computes the same in training and evaluation; returns it.

    PPO's ratio compares two passes over the same tokens: differences from dropout would look like a policy that has
    changed. The model's configuration keeps its rates, for further training of the saved model elsewhere.
    """
    for dropout in dropouts(model):
        dropout.p = 0.0  # type: ignore[assignment]
    for module in model.modules():
        # Some layers keep a rate themselves and pass it to torch's functions: dropout, attn_pdrop, layerdrop.
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    return model


def load_tokenizer(path: str) -> Any:
    """The tokenizer in `path`. ConfigError if the folder holds no tokenizer that loads."""
    check_sizes(path)  # transformers may make the model's configuration too, to find the tokenizer's class
    with reading(f"tokenizer: {path} holds no tokenizer that loads"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # For some architectures transformers makes an empty tokenizer if the folder holds none.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"tokenizer: {path} holds no tokenizer; its files belong beside the model's")
    return tokenizer


def max_length(config: Any) -> int:
    """Longest sequence that a model of this configuration takes, in tokens."""
    return int(getattr(config, "max_position_embeddings", 1 << 30))


def native_length(config: Any) -> int:
    """Longest sequence that a model of this configuration takes without RoPE scaling, in tokens."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope.get("original_max_position_embeddings") or max_length(config))
