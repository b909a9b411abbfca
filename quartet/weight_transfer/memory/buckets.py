"""The bytes of a push, bucket by bucket: filled by the sender, received by the replicas, hashed by both.

The memory is kept from push to push. Fresh memory costs a page fault for every 4 KiB, which takes several times as
long as the copy itself.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.pinning import pin

Weights = Iterable[tuple[str, torch.Tensor]]
"""Named tensors in a manifest's order."""

ALIGNMENT = 64
"""Buckets begin at multiples of this many bytes."""
DIGEST_CHUNK = 1 << 22
"""Bytes that one thread hashes at a time."""
DIGEST_THREADS = 8
"""Most threads that hash, where the process may use so many cores."""


class Buckets:
    """One buffer for each bucket of a manifest. With several senders each holds and fills only its share."""

    def __init__(
        self,
        manifest: Manifest,
        sender: int = 0,
        senders: int = 1,
        memory: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Uses `memory`, or allocates memory and touches every page.

        Args:
            manifest: the tensors of the push.
            sender: number of the sender whose share this is; with one sender everything.
            senders: bucket b is sent by sender b % senders.
            memory: uint8, [Buckets.size(manifest, sender, senders)]; None for new memory of the host.
            device: the device that the weights come from or go to, if it is not the memory's own. Buckets are packed
                there and then copied to the host at once; for a GPU the memory is pinned.
        """
        self.manifest = manifest
        self.ranges = list(manifest.buckets())
        self.numbers = list(range(sender, len(self.ranges), senders))
        """Numbers of this share's buckets."""
        if memory is None:
            memory = torch.zeros(self.size(manifest, sender, senders), dtype=torch.uint8)
        self._device = device
        if device is not None and device.type == "cuda":
            pin(memory, self)
        self._data: dict[int, torch.Tensor] = {}
        offset = 0
        for number in self.numbers:
            size = _bytes(manifest, self.ranges[number])
            self._data[number] = memory[offset : offset + size]
            offset += aligned(size)

    @staticmethod
    def size(manifest: Manifest, sender: int = 0, senders: int = 1) -> int:
        """Size in bytes of a sender's share."""
        share = list(manifest.buckets())[sender::senders]
        return sum(aligned(_bytes(manifest, bucket)) for bucket in share)

    def __getitem__(self, number: int) -> torch.Tensor:
        """The bytes of bucket `number`: uint8, [bytes of the bucket]."""
        return self._data[number]

    def take(self, number: int, arrived: torch.Tensor) -> None:
        """Copies a bucket in that has arrived elsewhere; on a GPU the copy may still be under way afterwards."""
        self._data[number].copy_(arrived, non_blocking=True)

    def fill(self, weights: Weights) -> Iterator[tuple[int, torch.Tensor]]:
        """Copies the weights in and yields each bucket of this share as soon as it is full: its number, and its bytes
        where they were packed, which is on the weights' device.

        Args:
            weights: named tensors in the manifest's order, on any device. All are consumed, also those of other
                senders' buckets: gathering them may need every rank.

        Raises:
            ValueError: they differ from the manifest.
        """
        remaining = iter(weights)
        for number, bucket in enumerate(self.ranges):
            packed = self._packed(number)
            offset = 0
            for index in bucket:
                tensor = self._expected(index, next(remaining, None))
                size = self.manifest.size(index)
                if packed is not None:
                    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                    packed[offset : offset + size].copy_(flat)
                offset += size
            if packed is not None:
                if packed is not self._data[number]:
                    # Waits for the work before it on this stream: the gathering of the tensors and their packing.
                    self._data[number].copy_(packed)
                yield number, packed

    def _packed(self, number: int) -> torch.Tensor | None:
        """Buffer in which the tensors of a bucket are packed; None for another sender's bucket."""
        if number not in self._data or self._device is None:
            return self._data.get(number)
        return torch.empty_like(self._data[number], device=self._device)

    def _expected(self, index: int, weight: tuple[str, torch.Tensor] | None) -> torch.Tensor:
        manifest = self.manifest
        expected = f"{manifest.names[index]} {manifest.dtypes[index]}{list(manifest.shapes[index])}"
        if weight is None:
            raise ValueError(f"weights: they end where the manifest has {expected}")
        name, tensor = weight
        came = f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if came != expected:
            raise ValueError(f"weights: {came} came where the manifest has {expected}")
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of this share's buckets, as views of their bytes."""
        for number in self.numbers:
            yield from self.manifest.cut(self.ranges[number], self._data[number])


def _bytes(manifest: Manifest, bucket: range) -> int:
    return sum(manifest.size(index) for index in bucket)


def aligned(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def digest(data: torch.Tensor) -> bytes:
    """XXH3 (128 bits) of the XXH3 of each DIGEST_CHUNK of a host tensor's bytes: detects transmission errors.

    The chunks are hashed by several threads, since one alone is slower than the memory of a large machine. Their size
    is fixed, so that the digest does not depend on the number of threads.
    """
    whole = memoryview(data.numpy())
    chunks = [whole[start : start + DIGEST_CHUNK] for start in range(0, len(whole), DIGEST_CHUNK)]
    each = map if len(chunks) < 2 else _hashers(os.getpid()).map
    return bytes(xxhash.xxh3_128_digest(b"".join(each(xxhash.xxh3_128_digest, chunks))))


@functools.cache
def _hashers(process: int) -> ThreadPoolExecutor:
    """The threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(min(DIGEST_THREADS, len(os.sched_getaffinity(0))), "digest")


def checksum(digests: Mapping[int, bytes]) -> str:
    """One checksum of a whole push from the digests of its buckets, by number; empty without digests."""
    if not digests:
        return ""
    return str(xxhash.xxh3_128_hexdigest(b"".join(digests[number] for number in sorted(digests))))
