"""The contents of a push: names, dtypes and shapes, and the packing into buckets that both sides derive from them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import torch


@dataclass(frozen=True, slots=True)
class Manifest:
    """Descriptions of a push's tensors, in sending order, without their data; sent as msgpack."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Each tensor's dtype without the `torch.`, such as "float32"."""
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> "Manifest":
        """The manifest of these named tensors, in their order."""
        return cls(
            names=tuple(tensors),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
            bucket_bytes=bucket_bytes,
        )

    def pack(self) -> bytes:
        """Packs the manifest as msgpack."""
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> "Manifest":
        """Reads a manifest from msgpack. ValueError if the bytes are not a manifest."""
        try:
            fields = msgpack.unpackb(data)
        except (ValueError, TypeError) as error:  # some of them without a word
            raise ValueError(f"not a weight manifest: {error!r}") from None
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Manifest":
        """Makes a manifest from plain lists and numbers. ValueError if they do not form one."""
        try:
            manifest = cls(
                names=tuple(fields["names"]),
                dtypes=tuple(fields["dtypes"]),
                shapes=tuple(tuple(shape) for shape in fields["shapes"]),
                bucket_bytes=int(fields["bucket_bytes"]),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a weight manifest: {error!r}") from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        """Raises ValueError, which names the first field that is wrong."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError("manifest: names, dtypes and shapes must be of one length")
        if not all(isinstance(name, str) for name in self.names) or len(set(self.names)) < len(self.names):
            raise ValueError("manifest.names: must be text, each once")
        if unknown := [name for name in self.dtypes if not _is_dtype(name)]:
            raise ValueError(f"manifest.dtypes: {unknown} are not torch dtypes")
        if not all(isinstance(side, int) and side >= 0 for shape in self.shapes for side in shape):
            raise ValueError("manifest.shapes: sides must be whole numbers, 0 or more")
        if self.bucket_bytes < 1:
            raise ValueError(f"manifest.bucket_bytes: {self.bucket_bytes}; must be at least 1")

    def dtype(self, index: int) -> torch.dtype:
        """Tensor `index`'s dtype."""
        dtype: torch.dtype = getattr(torch, self.dtypes[index])
        return dtype

    def size(self, index: int) -> int:
        """Tensor `index`'s size in bytes."""
        return int(math.prod(self.shapes[index]) * self.dtype(index).itemsize)

    def buckets(self) -> Iterator[range]:
        """Index ranges of the tensors of each bucket: at most bucket_bytes in total, or one larger tensor alone.

        For example tensors of 60, 30, 40 and 200 bytes with bucket_bytes=100 give the buckets 0..1, 2 and 3.
        """
        start, filled = 0, 0
        for index in range(len(self.names)):
            if index > start and filled + self.size(index) > self.bucket_bytes:
                yield range(start, index)
                start, filled = index, 0
            filled += self.size(index)
        if self.names:
            yield range(start, len(self.names))

    def cut(self, bucket: range, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of one bucket as views of its bytes (uint8, [bytes of the bucket])."""
        offset = 0
        for index in bucket:
            size = self.size(index)
            piece = data[offset : offset + size]
            # A view needs an aligned start, which may be missing after an odd-sized tensor of a smaller dtype.
            if offset % self.dtype(index).itemsize:
                piece = piece.clone()
            yield self.names[index], piece.view(self.dtype(index)).view(self.shapes[index])
            offset += size


def _is_dtype(name: object) -> bool:
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)
