"""Identities of models: hashes that two services compare before they trust each other's token ids and scores."""

import hashlib
from pathlib import Path
from typing import Any

from protos import common_pb2

_HASHED_WHOLE_BYTES = 256 << 20
"""Size of a file up to which all of it is hashed."""
_PIECES, _PIECE_BYTES = 256, 256 << 10
"""Number and size of the pieces of a larger file that are hashed."""
_OF_HUB = "models--"
"""Beginning of a model's folder in huggingface_hub's cache: models--ORG--NAME/snapshots/COMMIT."""


def model_hash(folder: str | Path) -> str:
    """sha256 over config.json and the weight files, by name and content.

    Of a file of more than 256 MiB its size and 256 pieces of 256 KiB are hashed, from its beginning to its end at
    equal distances, so that every large tensor has a part in it: hashing the whole of a 70B model would add minutes
    to every start.
    """
    digest = hashlib.sha256()
    root = Path(folder)
    files = [root / "config.json", *sorted(root.glob("*.safetensors")), *sorted(root.glob("*.bin"))]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= _HASHED_WHOLE_BYTES:
                digest.update(stream.read())
            else:
                for piece in range(_PIECES):
                    stream.seek((size - _PIECE_BYTES) * piece // (_PIECES - 1))
                    digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 over the vocabulary in the order of its ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """A tokenizer's largest id plus one. Models may have more entries, which are padding."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def folder_name(folder: str) -> str:
    """The last part of a model folder's path; of one called `model`, as trainings call theirs, with the part above;
    in a hub's cache the model's name, as the last part is a commit. Callers learn this name; the rest of the path is
    the machine's own."""
    path = Path(folder).resolve()
    if path.parent.name == "snapshots" and (kept := path.parents[1].name).startswith(_OF_HUB):
        return kept.removeprefix(_OF_HUB).replace("--", "/")
    return f"{path.parent.name}/{path.name}" if path.name == "model" and path.parent.name else path.name


def describe_model(
    folder: str, tokenizer: Any, *, vocab_size: int, max_length: int, dtype: str
) -> common_pb2.ModelInfo:
    """The ModelInfo that a service's Info carries. Reads the model's files: call it once, at start."""
    return common_pb2.ModelInfo(
        name=folder_name(folder),
        model_hash=model_hash(folder),
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        max_length=max_length,
        dtype=dtype,
    )
