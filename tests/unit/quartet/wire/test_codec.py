"""The wire codec: what goes in comes out, and what cannot be right is refused by its field's name."""

import re
from typing import Any

import msgpack
import numpy as np
import pytest

from protos import common_pb2
from quartet.wire.codec import (
    pack_floats,
    pack_ints,
    pack_longs,
    pack_metrics,
    pack_sequences,
    split,
    unpack_floats,
    unpack_ints,
    unpack_longs,
    unpack_metrics,
    unpack_sequences,
)
from quartet.wire.errors import InvalidArgument
from quartet.wire.ragged import Ragged


def refused(message: str) -> Any:
    return pytest.raises(InvalidArgument, match=re.escape(message))


def sequences(token_ids: list[int], lengths: list[int]) -> common_pb2.Sequences:
    return common_pb2.Sequences(token_ids=pack_ints(token_ids), lengths=pack_ints(lengths))


def test_numbers_are_little_endian_on_the_wire() -> None:
    assert pack_ints([1, -2]) == bytes([1, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF])
    assert pack_ints(np.asarray([258], np.int64)) == bytes([2, 1, 0, 0])
    assert pack_longs([2**40]) == bytes([0, 0, 0, 0, 0, 1, 0, 0])
    # 1.0 is 0x3F800000 in IEEE 754, -2.0 is 0xC0000000.
    two = [np.asarray([1.0], np.float32), np.asarray([-2.0])]
    assert pack_floats(two) == bytes([0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0])
    assert pack_floats(np.asarray([1.0])) == bytes([0, 0, 0x80, 0x3F])


@pytest.mark.parametrize("seed", range(5))
def test_numbers_round_trip(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(0, 50))
    ints = draw.integers(-(2**31), 2**31, count)
    longs = draw.integers(-(2**63), 2**63 - 1, count)
    floats = draw.standard_normal(count).astype(np.float32)
    assert unpack_ints(pack_ints(ints.tolist()), "x").tolist() == ints.tolist()
    assert unpack_longs(pack_longs(longs.tolist()), "x").tolist() == longs.tolist()
    assert unpack_floats(pack_floats(floats), "x").tolist() == floats.tolist()
    assert (unpack_ints(b"", "x").dtype.name, unpack_floats(b"", "x").dtype.name) == ("int32", "float32")


def test_bytes_that_are_not_a_whole_number_of_values() -> None:
    with refused("lengths: 5 bytes are not a whole number of 4-byte int32 values"):
        unpack_ints(bytes(5), "lengths")
    with refused("seeds: 12 bytes are not a whole number of 8-byte int64 values"):
        unpack_longs(bytes(12), "seeds")
    with refused("values: 3 bytes are not a whole number of 4-byte float32 values"):
        unpack_floats(bytes(3), "values")


def test_split_cuts_by_lengths() -> None:
    values = np.arange(6, dtype=np.float32)
    assert [part.tolist() for part in split(values, [1, 3, 2], "values")] == [[0], [1, 2, 3], [4, 5]]
    assert split(values[:0], [], "values") == []
    with refused("values: 6 values for 7 response tokens; there must be one per token"):
        split(values, [1, 3, 3], "values")
    with refused("values: 6 values for 0 response tokens"):
        split(values, [], "values")


@pytest.mark.parametrize("seed", range(5))
def test_sequences_round_trip(seed: int) -> None:
    draw = np.random.default_rng(seed)
    given = [draw.integers(0, 50, int(length)).astype(np.int32) for length in draw.integers(1, 9, 7)]
    actual = unpack_sequences(pack_sequences(given), "prompts", vocab_size=50)
    assert [sequence.tolist() for sequence in actual] == [sequence.tolist() for sequence in given]
    # Plain lists pack alike, and a message without sequences holds none.
    assert pack_sequences([sequence.tolist() for sequence in given]) == pack_sequences(given)
    assert list(unpack_sequences(pack_sequences([]), "prompts", vocab_size=50)) == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (sequences([1, 2, 3], [1, 1]), "prompts.lengths: add up to 2, but prompts.token_ids holds 3 ids"),
        (sequences([1, 2], [1, 2]), "prompts.lengths: add up to 3, but prompts.token_ids holds 2 ids"),
        (sequences([1], []), "prompts.lengths: add up to 0, but prompts.token_ids holds 1 ids"),
        # Sums that wrap around in 32 bits: 2^31 - 1 + 2^31 - 1 + 3 = 2^32 + 1, which is 1 mod 2^32.
        (sequences([1], [2**31 - 1, 2**31 - 1, 3]), "prompts.lengths: add up to 4294967297"),
        (sequences([1], [1, 0]), "prompts.lengths[1]: 0; every sequence needs at least 1 token(s)"),
        (sequences([1], [2, -1]), "prompts.lengths[1]: -1; every sequence needs at least 1 token(s)"),
        (sequences([4, 5, 10], [3]), "prompts.token_ids[2]: 10 is outside the vocabulary (0 to 9)"),
        (sequences([4, -1, 10], [3]), "prompts.token_ids[1]: -1 is outside the vocabulary (0 to 9)"),
        (sequences([4, 9, -1], [3]), "prompts.token_ids[2]: -1 is outside the vocabulary (0 to 9)"),
        (
            common_pb2.Sequences(token_ids=bytes(6)),
            "prompts.token_ids: 6 bytes are not a whole number of 4-byte int32",
        ),
        (
            common_pb2.Sequences(token_ids=bytes(4), lengths=bytes(3)),
            "prompts.lengths: 3 bytes are not a whole number",
        ),
    ],
)
def test_malformed_sequences(message: common_pb2.Sequences, expected: str) -> None:
    with refused(expected):
        unpack_sequences(message, "prompts", vocab_size=10)


def test_empty_sequences_where_they_are_allowed() -> None:
    actual = unpack_sequences(sequences([7], [0, 1, 0]), "x", vocab_size=10, allow_empty=True)
    assert [sequence.tolist() for sequence in actual] == [[], [7], []]
    with refused("x.lengths[0]: -1; every sequence needs at least 0 token(s)"):
        unpack_sequences(sequences([7], [-1, 2]), "x", vocab_size=10, allow_empty=True)


def test_metrics_round_trip() -> None:
    metrics = {"loss": 0.1, "steps": 3.0}
    assert unpack_metrics(pack_metrics(metrics)) == metrics


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x81\xa1a", msgpack.packb([1.0]), msgpack.packb({"a": "b"}), msgpack.packb({"a": None})]
)
def test_metrics_that_are_none(data: bytes) -> None:
    with refused("metrics: should be names and numbers as msgpack"):
        unpack_metrics(data)


def test_a_ragged_column_is_cut_without_copies_and_packs_as_its_rows_do() -> None:
    rows = [np.asarray(row, np.int32) for row in ([5, 6], [], [7], [8, 9, 10])]
    column = Ragged.of(rows)
    assert [row.tolist() for row in column] == [[5, 6], [], [7], [8, 9, 10]]
    assert column.lengths.tolist() == [2, 0, 1, 3]
    middle = column[1:3]
    assert ([row.tolist() for row in middle], middle.ids.base is column.ids) == ([[], [7]], True)
    assert [row.tolist() for row in column[::-2]] == [[8, 9, 10], []]
    assert (len(column[2:2]), len(Ragged.of([]))) == (0, 0)
    for some in (slice(0, 4), slice(1, 3), slice(2, 2)):
        assert pack_sequences(column[some]) == pack_sequences(rows[some])
