"""Pieces of weights as several workers take them: cut from buckets, and kept without the rest."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import Buckets
from quartet.weight_transfer.pieces import Piece, Pieces, StagedPieces, cut
from tests.fake_device import DEVICE, DOWN, UP, FakeDevice

WEIGHTS = {
    "rows": torch.arange(24.0).view(6, 4),
    "scale": torch.tensor(3.0),
    "odd": torch.arange(5, dtype=torch.uint8),  # what follows begins at no multiple of its size
    "columns": torch.arange(100.0, 124.0).view(4, 6),
    "half": torch.arange(6, dtype=torch.bfloat16),
    "not mine": torch.ones(7),
}
TAKEN: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "rows": [lambda w: w[2:4], lambda w: w[:1]],
    "scale": [lambda w: w],
    "odd": [lambda w: w[1:4]],
    "columns": [lambda w: w[:, 3:], lambda w: w[:2, :3].t(), lambda w: w.t()[2:3, 1:2], lambda w: w[4:, 0]],
    "half": [lambda w: w[3:]],
}
PIECES: Pieces = {name: [Piece.of(take(WEIGHTS[name])) for take in takes] for name, takes in TAKEN.items()}
BYTES = (8 + 4) * 4 + 4 + 3 + (12 + 6 + 1) * 4 + 3 * 2


def filled(manifest: Manifest, by: float = 0) -> Buckets:
    buckets = Buckets(manifest)
    list(buckets.fill((name, weight + weight.new_tensor(by)) for name, weight in WEIGHTS.items()))
    return buckets


def lists(weights: Iterator[tuple[str, list[Tensor]]]) -> dict[str, list[object]]:
    return {name: [piece.tolist() for piece in pieces] for name, pieces in weights}


def expected(by: float = 0) -> dict[str, list[object]]:
    return {
        name: [take(weight + weight.new_tensor(by)).tolist() for take in TAKEN.get(name, ())]
        for name, weight in WEIGHTS.items()
    }


@pytest.mark.parametrize("bucket_bytes", [1, 110, 10_000])
def test_pieces_are_those_of_the_weights_whatever_the_buckets(bucket_bytes: int) -> None:
    manifest = Manifest.of(WEIGHTS, bucket_bytes)
    staged = StagedPieces(manifest, PIECES, None, pinned=False)
    for by in (0, 2):
        buckets = filled(manifest, by)
        parts = [(bucket, buckets[number]) for number, bucket in enumerate(buckets.ranges)]
        assert lists(cut(manifest, parts, PIECES)) == expected(by)
        for number in reversed(range(len(parts))):
            staged.take(number, buckets[number])
        buckets[0].zero_()  # its memory is used again
        assert lists(staged.weights()) == expected(by)


@pytest.mark.parametrize("at", [None, DEVICE], ids=["host", "device"])
def test_pieces_alone_are_kept_where_they_are_asked_for(at: torch.device | None) -> None:
    manifest = Manifest.of(WEIGHTS, 10_000)
    with FakeDevice().counting() as device:
        arrived = filled(manifest)[0].to(DEVICE)
        staged = StagedPieces(manifest, PIECES, at, pinned=False)
        device.copied.clear()
        staged.take(0, arrived)
        assert device.copied == ({} if at else {("", DOWN): BYTES})
        assert (
            lists((name, [piece.to(DEVICE) for piece in pieces]) for name, pieces in staged.weights()) == expected()
        )
        assert device.copied["", UP] == (0 if at else BYTES)
