"""The `ipc` and `cuda-ipc` pushes: the learner writes the weights once, into memory that it shares with the replicas
of its machine, and they load them from there. Nothing is sent, and members do not wait for one another.

With `ipc` it is host memory. With `cuda-ipc` it is memory of the GPU that all of them share; a small segment of host
memory then holds its handle and the generation.

vLLM has its own ipc engine, based on CUDA handles. It is not used, because it needs VLLM_ALLOW_INSECURE_SERIALIZATION
(the handles are pickled) and loads weights into the serving model before they are verified.
"""

from collections.abc import Callable, Iterator

import torch

from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import Buckets, Weights, checksum, digest
from quartet.weight_transfer.memory.cuda_library import HANDLE_BYTES, CudaLibrary
from quartet.weight_transfer.memory.device_digest import device_digest
from quartet.weight_transfer.memory.device_memory import Cuda, DeviceMemory
from quartet.weight_transfer.memory.pinning import READ_ONLY, pin
from quartet.weight_transfer.memory.shared_memory import Segment

DigestOf = Callable[[torch.Tensor], bytes]


class SharedSender:
    """The learner's end: a Sender that forms no group, since any process of the machine may read."""

    def __init__(self, segment: Segment, buckets: Buckets, digest: DigestOf = digest) -> None:
        """Made by `host` or `gpu`."""
        self._segment, self._buckets, self._digest = segment, buckets, digest
        self._memory: DeviceMemory | None = None
        self._digests: dict[int, bytes] = {}

    @classmethod
    def host(
        cls, manifest: Manifest, *, sender: int = 0, senders: int = 1, device: torch.device | None = None
    ) -> "SharedSender":
        """Shares host memory. `device` is the weights' device, as for Buckets."""
        segment = _made(Buckets.size(manifest, sender, senders))
        return cls(segment, Buckets(manifest, sender, senders, memory=segment.data, device=device))

    @classmethod
    def gpu(
        cls, manifest: Manifest, device: torch.device, *, sender: int = 0, senders: int = 1, cuda: Cuda | None = None
    ) -> "SharedSender":
        """Shares memory of the GPU `device`, on which the weights are."""
        memory = DeviceMemory.allocate(Buckets.size(manifest, sender, senders), device, cuda)
        segment = _made(HANDLE_BYTES)
        # No reader knows the segment's number yet.
        segment.data.copy_(torch.frombuffer(bytearray(memory.handle()), dtype=torch.uint8))
        made = cls(segment, Buckets(manifest, sender, senders, memory=memory.data), device_digest)
        made._memory = memory
        return made

    def rendezvous(self) -> int:
        """The segment's number."""
        return self._segment.number

    def join(self, membership: int, world_size: int) -> None:
        """Does nothing: shared memory needs no group."""

    def load(self, weights: Weights, push: int) -> None:
        """Writes the weights of this push. A reader of the previous ones notices that they changed."""
        self._segment.begin()
        # A digest on the GPU waits for the copies into its bucket, so that all are written at the end.
        self._digests = {number: self._digest(self._buckets[number]) for number, _ in self._buckets.fill(weights)}
        self._segment.end()

    def send(self, push: int) -> dict[int, bytes]:
        """Sends nothing, since readers find the weights in memory; returns the digests."""
        return self._digests

    def abandon(self, membership: int) -> None:
        """Does nothing: no member waits for another."""

    def add_newcomers(self, membership: int, world_size: int) -> None:
        """Does nothing: newcomers read the same memory."""

    def close(self) -> None:
        """Frees the memory when its last reader leaves."""
        self._segment.close()
        if self._memory is not None:
            self._memory.close()


class SharedBuckets:
    """A replica's view of all senders' shared memory."""

    def __init__(self, segments: list[Segment], parts: list[Buckets], digest: DigestOf = digest) -> None:
        """Made by `host` or `gpu`."""
        self._segments, self._parts, self._digest = segments, parts, digest
        self._opened: list[DeviceMemory] = []
        self._read: list[int] = []

    @classmethod
    def host(
        cls,
        numbers: list[int],
        manifest: Manifest,
        device: torch.device | None = None,
        library: CudaLibrary | None = None,
    ) -> "SharedBuckets":
        """Attaches to the senders' segments, in the order of the senders; RuntimeError if one is missing.

        Args:
            numbers: the senders' numbers.
            manifest: the tensors of the push.
            device: the model's device. For a GPU the segments are pinned, so that it loads them at full speed.
            library: CUDA's runtime for pinning; None for torch's.
        """
        senders = len(numbers)
        segments = [_opened(number, Buckets.size(manifest, sender, senders)) for sender, number in enumerate(numbers)]
        if device is not None and device.type == "cuda":
            for segment in segments:
                pin(segment.data, segment, library, flags=READ_ONLY)
        parts = [Buckets(manifest, sender, senders, memory=segment.data) for sender, segment in enumerate(segments)]
        return cls(segments, parts)

    @classmethod
    def gpu(
        cls, numbers: list[int], manifest: Manifest, device: torch.device, cuda: Cuda | None = None
    ) -> "SharedBuckets":
        """Opens the senders' memory of the GPU `device`; RuntimeError if one is missing."""
        senders = len(numbers)
        made = cls([_opened(number, HANDLE_BYTES) for number in numbers], [], device_digest)
        try:
            for sender, segment in enumerate(made._segments):
                handle, size = bytes(segment.data.tolist()), Buckets.size(manifest, sender, senders)
                made._opened.append(DeviceMemory.open(handle, size, device, cuda))
                made._parts.append(Buckets(manifest, sender, senders, memory=made._opened[-1].data))
        except BaseException:
            made.close()
            raise
        return made

    def verify(self) -> str:
        """The checksum of the weights in memory; RuntimeError while they are being written."""
        self._read = [segment.generation for segment in self._segments]
        if any(generation % 2 for generation in self._read):
            raise RuntimeError("the learner is writing other weights already")
        return checksum({number: self._digest(part[number]) for part in self._parts for number in part.numbers})

    def buckets(self) -> Iterator[tuple[range, torch.Tensor]]:
        """For each bucket, in order, the numbers of its tensors in the manifest and its bytes, without a copy."""
        for number, bucket in enumerate(self._parts[0].ranges):
            yield bucket, self._parts[number % len(self._parts)][number]

    def check(self) -> None:
        """Raises RuntimeError if the weights changed since `verify`. Copies on a GPU have to be done before."""
        if [segment.generation for segment in self._segments] != self._read:
            raise RuntimeError("the learner wrote other weights while these were loaded")

    def close(self) -> None:
        """Gives back the GPU memory that was opened."""
        self._parts = []
        for memory in self._opened:
            memory.close()


def _made(size: int) -> Segment:
    """A sender's segment. RuntimeError, which says what else to configure, if shared memory has too little room."""
    try:
        return Segment.create(size)
    except RuntimeError as error:
        raise RuntimeError(f"{error}, or set orchestrator.weights.backend to gloo") from None


def _opened(number: int, size: int) -> Segment:
    """A sender's segment in a replica. RuntimeError, which says what to configure, if no process here has it."""
    try:
        return Segment.attach(number, size)
    except RuntimeError as error:
        raise RuntimeError(
            f"the learner's weights: {error}; weights.backend ipc needs the learner and the replicas on one machine: "
            "set it to auto"
        ) from None
