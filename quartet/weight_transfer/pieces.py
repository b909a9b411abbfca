"""The pieces of a push's weights that a worker's model takes, as a first load has shown them: of several workers of a
replica each takes a part of most weights, such as some rows of a matrix or some columns."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import aligned
from quartet.weight_transfer.memory.pinning import pin


@dataclass(frozen=True, slots=True)
class Piece:
    """Some numbers of a weight or of a memory: as in torch.as_strided, in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, offset: int = 0) -> "Piece":
        """The numbers of a view; `offset` is that of the weight."""
        return cls(tensor.storage_offset() - offset, tuple(tensor.shape), tensor.stride())

    def within(self, tensor: Tensor) -> Tensor:
        """The numbers as a view of the tensor."""
        return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.offset)


Pieces = Mapping[str, Sequence[Piece]]
"""Name of a weight -> its pieces. A weight that is not there has none."""


def cut(
    manifest: Manifest, buckets: Iterable[tuple[range, Tensor]], pieces: Pieces
) -> Iterator[tuple[str, list[Tensor]]]:
    """The pieces of each weight, as views of the buckets' bytes."""
    for bucket, data in buckets:
        for name, weight in manifest.cut(bucket, data):
            yield name, [piece.within(weight) for piece in pieces.get(name, ())]


class StagedPieces:
    """Memory in which a worker keeps its pieces of each bucket, one after another."""

    def __init__(self, manifest: Manifest, pieces: Pieces, device: torch.device | None, *, pinned: bool) -> None:
        """Allocates the memory.

        Args:
            manifest: the tensors of the push.
            pieces: those of them that are kept.
            device: the GPU in whose memory they are kept; None: in host memory.
            pinned: True to pin the host memory, for a GPU.
        """
        self.manifest, self.pieces = manifest, pieces
        self._ranges = list(manifest.buckets())
        self._kept = [_of_pieces(manifest, bucket, pieces) for bucket in self._ranges]
        sizes = [sum(map(kept.size, range(len(kept.names)))) for kept in self._kept]
        memory = torch.zeros(sum(map(aligned, sizes)), dtype=torch.uint8, device=device)
        if pinned:
            pin(memory, self)
        self._parts = [part[:size] for part, size in zip(memory.split([*map(aligned, sizes)]), sizes, strict=True)]

    def take(self, number: int, arrived: Tensor) -> None:
        """Keeps the pieces of a bucket (uint8, [bytes of the bucket]), wherever that has arrived."""
        weights = cut(self.manifest, [(self._ranges[number], arrived)], self.pieces)
        # Not as a view of -1: that of one number has the stride of its matrix, and then no bytes.
        flat = [
            piece.contiguous().as_strided((piece.numel(),), (1,)).view(torch.uint8)
            for _, found in weights
            for piece in found
        ]
        if flat:
            # Put together where they are, so that scattered numbers are copied from there at once.
            self._parts[number].copy_(torch.cat(flat), non_blocking=True)

    def weights(self) -> Iterator[tuple[str, list[Tensor]]]:
        """The pieces of each weight, as they were taken last."""
        for bucket, kept, part in zip(self._ranges, self._kept, self._parts, strict=True):
            pieces = (piece for _, piece in kept.cut(range(len(kept.names)), part))
            for name in self.manifest.names[bucket.start : bucket.stop]:
                yield name, list(itertools.islice(pieces, len(self.pieces.get(name, ()))))


def _of_pieces(manifest: Manifest, bucket: range, pieces: Pieces) -> Manifest:
    """The pieces of a bucket's weights as tensors of their own."""
    kept = [(index, piece) for index in bucket for piece in pieces.get(manifest.names[index], ())]
    return Manifest(
        names=tuple(manifest.names[index] for index, _ in kept),
        dtypes=tuple(manifest.dtypes[index] for index, _ in kept),
        shapes=tuple(piece.sizes for _, piece in kept),
        bucket_bytes=manifest.bucket_bytes,
    )
