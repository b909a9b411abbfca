"""The wire codec: ragged batches of numbers as packed little-endian bytes, and back.

Decoding checks everything that a sender could get wrong and raises InvalidArgument, which names the field.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import msgpack
import numpy as np
from numpy.typing import NDArray

from protos import common_pb2
from quartet.wire.errors import InvalidArgument
from quartet.wire.ragged import Ints as Ints
from quartet.wire.ragged import Ragged

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


def pack_ints(values: Iterable[int] | Ints) -> bytes:
    """Packs integers as int32, little-endian."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.int64)
    return array.astype("<i4", copy=False).tobytes()


def unpack_ints(data: bytes, field: str) -> Ints:
    """int32 values of shape [len(data) / 4]; InvalidArgument if the number of bytes is not a multiple of 4."""
    if len(data) % 4:
        raise InvalidArgument(f"{field}: {len(data)} bytes are not a whole number of 4-byte int32 values")
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def pack_longs(values: Iterable[int]) -> bytes:
    """Packs integers as int64, little-endian."""
    return np.fromiter(values, "<i8").tobytes()


def unpack_longs(data: bytes, field: str) -> NDArray[np.int64]:
    """int64 values of shape [len(data) / 8]; InvalidArgument if the number of bytes is not a multiple of 8."""
    if len(data) % 8:
        raise InvalidArgument(f"{field}: {len(data)} bytes are not a whole number of 8-byte int64 values")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False)


def pack_floats(arrays: Sequence[Floats] | Floats) -> bytes:
    """Packs floats as float32, little-endian, all arrays end to end."""
    if isinstance(arrays, np.ndarray):
        return arrays.astype("<f4", copy=False).tobytes()
    return b"".join(np.asarray(array, "<f4").tobytes() for array in arrays)


def unpack_floats(data: bytes, field: str) -> Floats:
    """float32 values of shape [len(data) / 4]; InvalidArgument if the number of bytes is not a multiple of 4."""
    if len(data) % 4:
        raise InvalidArgument(f"{field}: {len(data)} bytes are not a whole number of 4-byte float32 values")
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def split(values: Floats, lengths: Sequence[int], field: str) -> list[Floats]:
    """Cuts `values` into one array per length; InvalidArgument unless the lengths add up."""
    if len(values) != sum(lengths):
        raise InvalidArgument(
            f"{field}: {len(values)} values for {sum(lengths)} response tokens; there must be one per token"
        )
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []


def pack_sequences(sequences: Sequence[Ints] | Sequence[Sequence[int]]) -> common_pb2.Sequences:
    """Token sequences as their wire message. A Ragged is in the order of the wire already."""
    if isinstance(sequences, Ragged):
        return common_pb2.Sequences(token_ids=pack_ints(sequences.ids), lengths=pack_ints(sequences.lengths))
    arrays = [np.asarray(sequence, "<i4") for sequence in sequences]
    return common_pb2.Sequences(
        token_ids=b"".join(array.tobytes() for array in arrays),
        lengths=pack_ints([len(array) for array in arrays]),
    )


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Token sequences as the bytes that arrived: counted, but not yet decoded or checked."""

    token_ids: bytes
    lengths: bytes

    @classmethod
    def of(cls, message: common_pb2.Sequences) -> Self:
        """Takes the message's bytes. Protobuf copies them at each access, so this is done once."""
        return cls(message.token_ids, message.lengths)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths) // 4

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self.token_ids) // 4

    def unpack(self, field: str, *, vocab_size: int, allow_empty: bool = False) -> Ragged:
        """The sequences, as views of the bytes.

        Raises:
            InvalidArgument: lengths that do not add up, a sequence without tokens (unless `allow_empty`),
                or an id outside 0 .. vocab_size - 1.
        """
        ids = unpack_ints(self.token_ids, f"{field}.token_ids")
        lengths = unpack_ints(self.lengths, f"{field}.lengths")
        smallest = 0 if allow_empty else 1
        if len(lengths) and int(lengths.min()) < smallest:
            index = int(np.argmin(lengths))
            raise InvalidArgument(
                f"{field}.lengths[{index}]: {lengths[index]}; every sequence needs at least {smallest} token(s)"
            )
        total = int(lengths.sum(dtype=np.int64))
        if total != len(ids):
            raise InvalidArgument(f"{field}.lengths: add up to {total}, but {field}.token_ids holds {len(ids)} ids")
        # Checks the smallest and the largest id: comparing every id would allocate an array of booleans.
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
            raise InvalidArgument(
                f"{field}.token_ids[{at}]: {ids[at]} is outside the vocabulary (0 to {vocab_size - 1})"
            )
        return Ragged(ids, lengths)


def unpack_sequences(
    message: common_pb2.Sequences, field: str, *, vocab_size: int, allow_empty: bool = False
) -> Ragged:
    """Token sequences from their wire message; raises as PackedSequences.unpack does."""
    return PackedSequences.of(message).unpack(field, vocab_size=vocab_size, allow_empty=allow_empty)


def check_length(prompt: int, response: int, max_length: int, field: str) -> None:
    """Raises InvalidArgument if a prompt and a response of that many tokens exceed `max_length` together."""
    if prompt + response > max_length:
        raise InvalidArgument(
            f"{field}: {prompt} prompt + {response} response tokens exceed the model's max_length of {max_length}"
        )


def pack_metrics(metrics: dict[str, float]) -> bytes:
    """Free-form numbers as msgpack."""
    return bytes(msgpack.packb(metrics))


def unpack_metrics(data: bytes) -> dict[str, float]:
    """Unpacks what pack_metrics packed. InvalidArgument if it is something else."""
    try:
        return {str(name): float(value) for name, value in msgpack.unpackb(data).items()}
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument("metrics: should be names and numbers as msgpack") from None
