"""The bytes of a push, bucket by bucket: filled by the sender, received by the replicas, hashed by both.

The memory is kept from push to push. Fresh memory costs a page fault for every 4 KiB, which takes several times as
long as the copy itself.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
import xxhash

from services.common.weight_transfer.manifest import Manifest

Weights = Iterable[tuple[str, torch.Tensor]]
"""Named tensors in a manifest's order."""

ALIGNMENT = 64
"""Bytes at whose multiples buckets begin in memory that they share."""


class Buckets:
    """One host buffer for each bucket of a manifest; of several senders, each fills only its share."""

    def __init__(
        self, manifest: Manifest, sender: int = 0, senders: int = 1, memory: torch.Tensor | None = None
    ) -> None:
        """Allocates and touches the memory, or takes it from `memory`.

        Args:
            manifest: what is pushed.
            sender: whose share to hold; with one sender, everything.
            senders: bucket b is sent by sender b % senders.
            memory: uint8, [Buckets.size(manifest, sender, senders)]; None for new memory.
        """
        self.manifest = manifest
        self.ranges = list(manifest.buckets())
        self.numbers = list(range(sender, len(self.ranges), senders))
        """Which buckets are held here."""
        if memory is None:
            memory = torch.zeros(self.size(manifest, sender, senders), dtype=torch.uint8)
        self._data: dict[int, torch.Tensor] = {}
        offset = 0
        for number in self.numbers:
            size = _bytes(manifest, self.ranges[number])
            self._data[number] = memory[offset : offset + size]
            offset += _aligned(size)

    @staticmethod
    def size(manifest: Manifest, sender: int = 0, senders: int = 1) -> int:
        """Bytes of a sender's share, end to end."""
        share = list(manifest.buckets())[sender::senders]
        return sum(_aligned(_bytes(manifest, bucket)) for bucket in share)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Bucket `number`'s bytes: uint8, [bytes of the bucket]."""
        return self._data[number]

    def fill(self, weights: Weights) -> Iterator[int]:
        """Copies the weights in and yields each own bucket's number as soon as it is full.

        Args:
            weights: named tensors in the manifest's order, from any device. All are consumed, those of other
                senders' buckets too: gathering them may need every rank.

        Raises:
            ValueError: they are not those of the manifest.
        """
        remaining = iter(weights)
        for number, bucket in enumerate(self.ranges):
            offset = 0
            for index in bucket:
                tensor = self._expected(index, next(remaining, None))
                size = self.manifest.size(index)
                if number in self._data:
                    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                    self._data[number][offset : offset + size].copy_(flat)
                offset += size
            if number in self._data:
                yield number

    def _expected(self, index: int, found: tuple[str, torch.Tensor] | None) -> torch.Tensor:
        manifest = self.manifest
        expected = f"{manifest.names[index]} {manifest.dtypes[index]}{list(manifest.shapes[index])}"
        if found is None:
            raise ValueError(f"weights: they end where the manifest has {expected}")
        name, tensor = found
        came = f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if came != expected:
            raise ValueError(f"weights: {came} came where the manifest has {expected}")
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of all buckets held here, as views of them."""
        for number in self.numbers:
            yield from self.manifest.cut(self.ranges[number], self._data[number])


def _bytes(manifest: Manifest, bucket: range) -> int:
    return sum(manifest.size(index) for index in bucket)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def digest(data: torch.Tensor) -> bytes:
    """XXH3 (128 bits) of a host tensor's bytes: it finds transmission errors, at the speed of memory."""
    return bytes(xxhash.xxh3_128_digest(memoryview(data.numpy())))


def checksum(digests: Mapping[int, bytes]) -> str:
    """One checksum of a whole push from the digests of its buckets by number; empty for none."""
    if not digests:
        return ""
    return str(xxhash.xxh3_128_hexdigest(b"".join(digests[number] for number in sorted(digests))))
