"""Limits and errors of model folders from elsewhere, whose authors may have written anything into them."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quartet.config.base import ConfigError, check_regular

MOST = {
    "layers": 1_000,
    "layer": 1_000,
    "blocks": 1_000,
    "depth": 1_000,
    "depths": 1_000,
    "experts": 10_000,
    "labels": 100_000,
    "head": 100_000,
    "heads": 100_000,
    "dim": 1_000_000,
    "embd": 1_000_000,
    "hidden": 1_000_000,
    "d_model": 1_000_000,
    "vocab": 10_000_000,
    "id": 10_000_000,
    "position": 1_000_000_000,
    "positions": 1_000_000_000,
}
"""Key of config.json or generation_config.json, or a word in it -> the most that its number may be. transformers
makes objects for each of some before it has read a weight, and tables of others; published models have up to 126
layers, 512 experts and 10 million positions."""
LEAST = {"num_hidden_layers": 0, "num_layers": 0, "n_layers": 0, "n_layer": 0}
"""Key -> the least that its number may be; with fewer, transformers makes a model without layers."""
TOKENS = {
    "length": math.inf,
    "len": math.inf,
    "max": math.inf,
    "id": 10_000_000,
    "vocab": 10_000_000,
    "size": 10_000_000,
    "extra": 1_000,
    "ids": 1_000,
    "madeup": 1_000,
    "words": 1_000,
    "offset": 1_000,
}
"""Word in a key of tokenizer_config.json -> the most that its number may be. Some tokenizers make a token for each of
the last ones, in a time that grows with its square; published ones have up to 125."""
OTHER_TOKENS = 100_000
"""The most of every other number in tokenizer_config.json."""
TOKEN_ID = 1_000_000
"""The largest id of an added token: some tokenizers make a token for each id below. Published ones have 262,144 of
them, one 901,629."""


@contextmanager
def reading(refusal: str) -> Iterator[None]:
    """Raises ConfigError, which begins with `refusal`, for any error meanwhile: a file from elsewhere may hold
    whatever its author liked, and transformers lets errors of all kinds through."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ConfigError(f"{refusal}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """The error's first line, and the next one where it only announces that; in our words where it advises to
    trust the file."""
    text = str(error)
    if "trust_remote_code" in text:
        return "it needs the Python code that the folder names as auto_map, which is never run"
    if "weights_only" in text:
        return (
            "its weights are damaged, or hold Python objects besides tensors, which are never made; save them as "
            "safetensors where you trust them"
        )
    first, *others = text.splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if others and first.endswith(":") else first


def is_panic(error: BaseException) -> bool:
    """True for a panic of a library in Rust, such as that of tokenizers where a regular expression of a
    tokenizer.json takes too many tries. Its class derives from BaseException, and no module holds it."""
    return type(error).__name__ == "PanicException"


def check_sizes(path: str) -> None:
    """Raises ConfigError if a small JSON file in the folder asks for more parts or tokens than any model has, as
    transformers would be busy with making them for minutes, or take all memory, or if a file in it is a pipe, socket
    or device. What cannot be read is left to transformers."""
    with suppress(OSError):
        for file in sorted(Path(path).iterdir()):
            check_regular(file, "model")
    for name, limits in _LIMITS.items():
        file = Path(path) / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        with reading(f"model: {file}"):
            for field, value, limit in _beyond(content, "", limits):
                # As a float, which an integer of hundreds of digits is too large for.
                raise ConfigError(f"model: {file}: {field}: {min(max(value, -1e300), 1e300):g}, where {limit}")


def _of_model(key: str) -> tuple[float, float]:
    """(least, most) of the number of that key in config.json or generation_config.json."""
    return LEAST.get(key, -math.inf), min(
        (MOST[word] for word in (key, *key.split("_")) if word in MOST), default=math.inf
    )


def _of_tokenizer(key: str) -> tuple[float, float]:
    """The same for tokenizer_config.json."""
    return -math.inf, min((TOKENS[word] for word in key.split("_") if word in TOKENS), default=OTHER_TOKENS)


def _of_added(key: str) -> tuple[float, float]:
    """The same for added_tokens.json, whose keys are tokens."""
    return -math.inf, TOKEN_ID


_LIMITS: dict[str, Callable[[str], tuple[float, float]]] = {
    "config.json": _of_model,
    "generation_config.json": _of_model,
    "tokenizer_config.json": _of_tokenizer,
    "added_tokens.json": _of_added,
}


def _beyond(value: Any, field: str, limits: Callable[[str], tuple[float, float]]) -> Iterator[tuple[str, float, str]]:
    """(field, number, limit in words) of each number beyond its limits, and of each key that is such an id."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # Python converts no more than some thousand digits.
            if field == "added_tokens_decoder" and key.isdecimal() and (number := int(key[:300])) > TOKEN_ID:
                yield field, number, f"{TOKEN_ID} are the most"
            yield from _beyond(inner, f"{field}.{key}" if field else key, limits)
    elif isinstance(value, list):
        for inner in value:
            yield from _beyond(inner, field, limits)
    elif isinstance(value, int | float):
        least, most = limits(field.rpartition(".")[2])
        if value < least:
            yield field, value, f"{least} is the least"
        elif most < math.inf and not value <= most:
            yield field, value, f"{most} are the most"
