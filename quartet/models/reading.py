"""Limits and errors of model folders from elsewhere, whose authors may have written anything into them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quartet.config.base import ConfigError

MOST = {
    "layers": 1_000,
    "layer": 1_000,
    "blocks": 1_000,
    "depth": 1_000,
    "depths": 1_000,
    "experts": 10_000,
    "labels": 100_000,
}
"""Word in a key of config.json -> the most that its number may be. transformers makes objects for each of them before
it has read a weight; published models have up to 126 layers and 512 experts."""


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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "trust_remote_code" in str(error):
            reason = "it needs the Python code that the folder names as auto_map, which is never run"
        raise ConfigError(f"{refusal}: {reason}") from None


def is_panic(error: BaseException) -> bool:
    """True for a panic of a library in Rust, such as that of tokenizers where a regular expression of a
    tokenizer.json takes too many tries. Its class derives from BaseException, and no module holds it."""
    return type(error).__name__ == "PanicException"


def check_sizes(path: str) -> None:
    """Raises ConfigError if the config.json in the folder asks for more parts than any model has, as transformers
    would be busy with making them for minutes, or take all memory. What cannot be read is left to transformers."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for field, value, most in _too_many(config, ""):
        raise ConfigError(f"model: {path}/config.json: {field}: {value:g}, where {most} are the most")


def _too_many(value: Any, field: str) -> Iterator[tuple[str, float, int]]:
    """(field, number, most) of each number that is too large."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _too_many(inner, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _too_many(inner, field)
    elif isinstance(value, int | float):
        words = field.rpartition(".")[2].split("_")
        most = min((MOST[word] for word in words if word in MOST), default=None)
        if most is not None and not value <= most:
            yield field, value, most
