"""The wire codec: ragged batches of numbers as packed little-endian bytes, and back.

Decoding checks everything that a sender could get wrong and raises InvalidArgument naming the field.
"""

from collections.abc import Iterable, Sequence

import msgpack
import numpy as np
from numpy.typing import NDArray

from protos import common_pb2
from services.common.errors import InvalidArgument

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


def pack_ints(values: Iterable[int] | Ints) -> bytes:
    """int32, little-endian."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.int64)
    return array.astype("<i4", copy=False).tobytes()


def unpack_ints(data: bytes, field: str) -> Ints:
    """int32 values of shape [len(data) / 4]; InvalidArgument if the bytes are no whole number of them."""
    if len(data) % 4:
        raise InvalidArgument(f"{field}: {len(data)} bytes are no whole number of 4-byte int32 values")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def pack_longs(values: Iterable[int]) -> bytes:
    """int64, little-endian."""
    return np.fromiter(values, "<i8").tobytes()


def unpack_longs(data: bytes, field: str) -> NDArray[np.int64]:
    """int64 values; InvalidArgument if the bytes are no whole number of them."""
    if len(data) % 8:
        raise InvalidArgument(f"{field}: {len(data)} bytes are no whole number of 8-byte int64 values")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False)


def pack_floats(arrays: Sequence[Floats] | Floats) -> bytes:
    """float32, little-endian, all arrays end to end."""
    if isinstance(arrays, np.ndarray):
        return arrays.astype("<f4", copy=False).tobytes()
    return b"".join(np.asarray(array, "<f4").tobytes() for array in arrays)


def unpack_floats(data: bytes, field: str) -> Floats:
    """float32 values of shape [len(data) / 4]; InvalidArgument if the bytes are no whole number of them."""
    if len(data) % 4:
        raise InvalidArgument(f"{field}: {len(data)} bytes are no whole number of 4-byte float32 values")
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def unpack_finite(data: bytes, field: str) -> Floats:
    """Like unpack_floats; InvalidArgument also where a value is NaN or infinite."""
    values = unpack_floats(data, field)
    if not np.isfinite(values).all():
        raise InvalidArgument(f"{field}: value {int(np.argmin(np.isfinite(values)))} is not finite")
    return values


def split(values: Floats, lengths: Sequence[int], field: str) -> list[Floats]:
    """Cuts `values` into one array per length; InvalidArgument unless the lengths add up."""
    if len(values) != sum(lengths):
        raise InvalidArgument(
            f"{field}: {len(values)} values for {sum(lengths)} response tokens; there must be one per token"
        )
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def pack_sequences(sequences: Sequence[Ints] | Sequence[Sequence[int]]) -> common_pb2.Sequences:
    """Token sequences as their wire message."""
    arrays = [np.asarray(sequence, "<i4") for sequence in sequences]
    return common_pb2.Sequences(
        token_ids=b"".join(array.tobytes() for array in arrays),
        lengths=pack_ints([len(array) for array in arrays]),
    )


def pack_pairs(prompts: Sequence[Ints], responses: Sequence[Ints]) -> common_pb2.Pairs:
    """Prompts and their responses as their wire message."""
    return common_pb2.Pairs(prompts=pack_sequences(prompts), responses=pack_sequences(responses))


def unpack_sequences(
    message: common_pb2.Sequences, field: str, *, vocab_size: int, allow_empty: bool = False
) -> list[Ints]:
    """Token sequences from their wire message.

    Raises:
        InvalidArgument: lengths that do not add up, a sequence without tokens (unless `allow_empty`),
            or an id outside 0 .. vocab_size - 1.
    """
    ids = unpack_ints(message.token_ids, f"{field}.token_ids")
    lengths = unpack_ints(message.lengths, f"{field}.lengths")
    smallest = 0 if allow_empty else 1
    if len(lengths) and int(lengths.min()) < smallest:
        index = int(np.argmin(lengths))
        raise InvalidArgument(
            f"{field}.lengths[{index}]: {lengths[index]}; every sequence needs at least {smallest} token(s)"
        )
    total = int(lengths.sum(dtype=np.int64))
    if total != len(ids):
        raise InvalidArgument(f"{field}.lengths: add up to {total}, but {field}.token_ids holds {len(ids)} ids")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(np.argmax(outside))
        raise InvalidArgument(f"{field}.token_ids[{at}]: {ids[at]} is outside the vocabulary (0 to {vocab_size - 1})")
    return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []


def unpack_pairs(
    message: common_pb2.Pairs, *, vocab_size: int, max_length: int, field: str = "pairs"
) -> tuple[list[Ints], list[Ints]]:
    """Prompts and responses, checked as in unpack_sequences and against the model's length.

    Raises:
        InvalidArgument: besides, no pairs at all, unequal numbers, or a pair longer than the model takes.
    """
    prompts = unpack_sequences(message.prompts, f"{field}.prompts", vocab_size=vocab_size)
    responses = unpack_sequences(message.responses, f"{field}.responses", vocab_size=vocab_size)
    if not prompts:
        raise InvalidArgument(f"{field}: empty; send at least one prompt and response")
    if len(prompts) != len(responses):
        raise InvalidArgument(f"{field}: {len(prompts)} prompts but {len(responses)} responses; send one for one")
    check_lengths(prompts, responses, max_length, field)
    return prompts, responses


def check_lengths(prompts: Sequence[Ints], responses: Sequence[Ints], max_length: int, field: str) -> None:
    """InvalidArgument where a prompt and its response together exceed `max_length` tokens."""
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) + len(response) > max_length:
            raise InvalidArgument(
                f"{field}[{index}]: {len(prompt)} prompt + {len(response)} response tokens "
                f"exceed the model's max_length of {max_length}"
            )


def pack_metrics(metrics: dict[str, float]) -> bytes:
    """Free-form numbers as msgpack."""
    return bytes(msgpack.packb(metrics))


def unpack_metrics(data: bytes) -> dict[str, float]:
    """The inverse of pack_metrics."""
    return {str(name): float(value) for name, value in msgpack.unpackb(data).items()}
