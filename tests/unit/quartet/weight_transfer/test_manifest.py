"""The list of weights that a push carries, from which both sides pack alike."""

from itertools import chain, pairwise
from typing import Any

import msgpack
import pytest
import torch

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import Buckets


def manifest(*sizes: int, bucket_bytes: int) -> Manifest:
    """Tensors of so many bytes each."""
    tensors = {f"t{index}": torch.zeros(size, dtype=torch.uint8) for index, size in enumerate(sizes)}
    return Manifest.of(tensors, bucket_bytes)


def buckets(manifest: Manifest) -> list[list[int]]:
    return [list(bucket) for bucket in manifest.buckets()]


def test_a_manifest_names_dtypes_and_shapes_in_order() -> None:
    tensors = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros(()), "c": torch.zeros(0, 4)}
    made = Manifest.of(tensors, 10)
    assert made.names == ("b", "a", "c")
    assert made.dtypes == ("bfloat16", "float32", "float32")
    assert made.shapes == ((2, 3), (), (0, 4))
    assert [made.size(index) for index in range(3)] == [12, 4, 0]


def test_buckets_by_hand() -> None:
    # 4 + 4 = 8 fits; with 2 more it would be 10. 2 + 6 = 8 fits again.
    assert buckets(manifest(4, 4, 2, 6, bucket_bytes=8)) == [[0, 1], [2, 3]]
    assert buckets(manifest(4, 4, 2, 6, bucket_bytes=9)) == [[0, 1], [2, 3]]
    assert buckets(manifest(4, 4, 2, 6, bucket_bytes=10)) == [[0, 1, 2], [3]]
    assert buckets(manifest(4, 4, 2, 6, bucket_bytes=16)) == [[0, 1, 2, 3]]
    assert buckets(Manifest((), (), (), 8)) == []


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    assert buckets(manifest(9, 1, bucket_bytes=8)) == [[0], [1]]
    assert buckets(manifest(1, 9, 1, bucket_bytes=8)) == [[0], [1], [2]]
    assert buckets(manifest(9, 9, bucket_bytes=1)) == [[0], [1]]


@pytest.mark.parametrize("seed", range(10))
def test_buckets_cover_everything_once_in_order_and_are_full(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 20, (30,), generator=draw).tolist()
    limit = int(torch.randint(1, 40, (1,), generator=draw))
    actual = buckets(manifest(*sizes, bucket_bytes=limit))
    assert list(chain.from_iterable(actual)) == list(range(30))
    for bucket, following in pairwise(actual):
        total = sum(sizes[index] for index in bucket)
        assert total <= limit or len(bucket) == 1
        assert total + sizes[following[0]] > limit


def test_fill_and_cut_are_inverse_for_mixed_dtypes_at_odd_offsets() -> None:
    torch.manual_seed(0)
    tensors = {
        "byte": torch.tensor([7], dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),  # begins at byte 1
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(2, 2).to(torch.bfloat16),  # begins at byte 28
        "transposed": torch.randn(2, 3).T,
        "none": torch.zeros(0, 5),
        "scalar": torch.tensor(-1.5, requires_grad=True),
        "long": torch.tensor([2**40]),
    }
    for bucket_bytes in (1, 30, 1000):
        made = Manifest.of(tensors, bucket_bytes)
        packed = Buckets(made)
        for number, _ in packed.fill(tensors.items()):
            size = sum(made.size(index) for index in packed.ranges[number])
            assert (packed[number].dtype, len(packed[number])) == (torch.uint8, size)
        actual = dict(packed.tensors())
        assert list(actual) == list(tensors)
        for name, tensor in tensors.items():
            assert actual[name].dtype == tensor.dtype
            assert torch.equal(actual[name], tensor.detach())


def test_cut_gives_views_where_it_can() -> None:
    made = Manifest.of({"a": torch.zeros(2), "b": torch.zeros(1)}, 100)
    data = torch.zeros(12, dtype=torch.uint8)
    pieces = dict(made.cut(range(2), data))
    assert pieces["b"].data_ptr() == data.data_ptr() + 8


def test_a_manifest_round_trips() -> None:
    made = Manifest.of({"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros(())}, 64 << 20)
    assert Manifest.unpack(made.pack()) == made


GOOD: dict[str, Any] = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[2], []], "bucket_bytes": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["a"]}, "names, dtypes and shapes must be of one length"),
        ({"names": ["a", "a"]}, "manifest.names: must be text, each once"),
        ({"names": ["a", 1]}, "manifest.names: must be text, each once"),
        ({"dtypes": ["float32", "float33"]}, r"manifest.dtypes: \['float33'\] are not torch dtypes"),
        ({"dtypes": ["float32", "nn"]}, r"manifest.dtypes: \['nn'\] are not torch dtypes"),
        ({"dtypes": ["float32", 1]}, r"manifest.dtypes: \[1\] are not torch dtypes"),
        ({"shapes": [[2], [-1]]}, "manifest.shapes: sides must be whole numbers"),
        ({"shapes": [[2], ["x"]]}, "manifest.shapes: sides must be whole numbers"),
        ({"shapes": [[2], 3]}, "not a weight manifest"),
        ({"bucket_bytes": 0}, "manifest.bucket_bytes: 0; must be at least 1"),
        ({"bucket_bytes": None}, "not a weight manifest"),
        ({"bucket_bytes": float("inf")}, "not a weight manifest"),
    ],
)
def test_malformed_manifests(change: dict[str, Any], message: str) -> None:
    Manifest.from_fields(GOOD)
    with pytest.raises(ValueError, match=message):
        Manifest.unpack(msgpack.packb(GOOD | change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(GOOD)[:-3],
        msgpack.packb(GOOD) + b"x",
        msgpack.packb([1]),
        msgpack.packb({}),
        b"\x91" * 2000,
    ],
)
def test_bytes_that_are_not_a_manifest(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a weight manifest: "):
        Manifest.unpack(data)
