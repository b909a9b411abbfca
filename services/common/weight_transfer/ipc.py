"""The `ipc` push: the learner writes the weights once, into memory that it shares with the replicas of its machine,
and they load them from there. Nothing is sent, and members do not wait for one another.

vLLM has its own ipc engine, based on CUDA handles. It is not used, because it needs VLLM_ALLOW_INSECURE_SERIALIZATION
(the handles are pickled) and loads weights into the serving model before they are verified.
"""

from collections.abc import Iterator

import torch

from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.memory.buckets import Buckets, Weights, checksum, digest
from services.common.weight_transfer.memory.shared_memory import Segment


class SharedSender:
    """The learner's end: a Sender that forms no group, since any process of the machine may read."""

    def __init__(
        self, manifest: Manifest, *, sender: int = 0, senders: int = 1, device: torch.device | None = None
    ) -> None:
        """Creates the shared memory. `device` is the weights' device, as for Buckets."""
        self._segment = Segment.create(Buckets.size(manifest, sender, senders))
        self._buckets = Buckets(manifest, sender, senders, memory=self._segment.data, device=device)
        self._digests: dict[int, bytes] = {}

    def rendezvous(self) -> int:
        """The segment's number."""
        return self._segment.number

    def join(self, membership: int, world_size: int) -> None:
        """Does nothing: shared memory needs no group."""

    def load(self, weights: Weights, push: int) -> None:
        """Writes the weights of this push. A reader of the previous ones notices that they changed."""
        self._segment.begin()
        self._digests = {number: digest(self._buckets[number]) for number in self._buckets.fill(weights)}
        self._segment.end()

    def send(self, push: int) -> dict[int, bytes]:
        """Sends nothing, since readers find the weights in memory; returns no digests."""
        return self._digests

    def abandon(self, membership: int) -> None:
        """Does nothing: no member waits for another."""

    def admit(self, membership: int, world_size: int) -> None:
        """Does nothing: newcomers read the same memory."""

    def close(self) -> None:
        """Frees the memory when its last reader leaves."""
        self._segment.close()


class SharedBuckets:
    """A replica's view of all senders' shared memory."""

    def __init__(self, numbers: list[int], manifest: Manifest) -> None:
        """Attaches to the senders' segments, in the order of the senders; RuntimeError if one is missing."""
        senders = len(numbers)
        self._segments = [
            Segment.attach(number, Buckets.size(manifest, sender, senders)) for sender, number in enumerate(numbers)
        ]
        self._parts = [
            Buckets(manifest, sender, senders, memory=segment.data) for sender, segment in enumerate(self._segments)
        ]
        self._read: list[int] = []

    def verify(self) -> str:
        """The checksum of the weights in memory; RuntimeError while they are being written."""
        self._read = [segment.generation for segment in self._segments]
        if any(generation % 2 for generation in self._read):
            raise RuntimeError("the learner is writing other weights already")
        return checksum({number: digest(part[number]) for part in self._parts for number in part.numbers})

    def buckets(self) -> Iterator[tuple[range, torch.Tensor]]:
        """For each bucket, in order, the numbers of its tensors in the manifest and its bytes, without a copy."""
        for number, bucket in enumerate(self._parts[0].ranges):
            yield bucket, self._parts[number % len(self._parts)][number]

    def check(self) -> None:
        """Raises RuntimeError if the weights changed since `verify`."""
        if [segment.generation for segment in self._segments] != self._read:
            raise RuntimeError("the learner wrote other weights while these were loaded")
