"""Checks that the weights of a model are all there, without reading them."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Files of a model's weights that transformers looks for, the first one that is there; each may have an index of
several parts instead."""


def broken_weights(folder: str) -> Iterator[str]:
    """A line for each file of weights that is missing or incomplete in a model's folder."""
    root = Path(folder)
    for name in _NAMES:
        index = root / f"{name}.index.json"
        if (root / name).exists() or index.exists():
            for part in [name] if (root / name).exists() else _parts(index):
                yield from _broken(root / part)
            return
    yield f"{folder} holds no weights; it should hold {_NAMES[0]}, or its parts and their index"


def _parts(index: Path) -> list[str]:
    """The files that an index names; the index itself if it cannot be read."""
    try:
        found = json.loads(index.read_text())
        return sorted(set(found["weight_map"].values())) if "metadata" in found else [index.name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [index.name]


def _broken(file: Path) -> Iterator[str]:
    if file.suffix == ".json":
        yield f"{file} is no index of weights; copy it again"
    elif not file.is_file():
        yield f"{file} is missing"
    elif file.suffix == ".safetensors":
        try:
            # Compares the sizes in the header with the file's, which is not mapped: that may take more memory than
            # there is.
            with safe_open(file, framework="pt", backend="pread"):
                pass
        except (SafetensorError, OSError) as error:
            yield f"{file} is incomplete or no file of weights ({error}); copy it again"
