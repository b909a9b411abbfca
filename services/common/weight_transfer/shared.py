"""The `ipc` push: the learner writes the weights once, into memory that it shares with the replicas of its machine,
and they load them from there. Nothing is sent, and nobody waits for anybody.

vLLM has an ipc engine of its own, over CUDA's handles. It wants VLLM_ALLOW_INSECURE_SERIALIZATION, as the handles
travel pickled, and loads into the serving model before anything is verified; neither is for us.
"""

from services.common.weight_transfer.buckets import Buckets, Weights, checksum, digest
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.segment import Segment


class SharedSender:
    """The learner's end: a Sender whose group is whoever reads."""

    keeps_copy = True

    def __init__(self, manifest: Manifest, *, sender: int = 0, senders: int = 1) -> None:
        self._segment = Segment.create(Buckets.size(manifest, sender, senders))
        self._buckets = Buckets(manifest, sender, senders, memory=self._segment.data)
        self._digests: dict[int, bytes] = {}

    def rendezvous(self) -> int:
        """The segment's number."""
        return self._segment.number

    def join(self, epoch: int, world_size: int) -> None:
        """See Sender: there is nothing to form."""

    def load(self, weights: Weights, push: int) -> None:
        """See Sender. Whoever is still reading what was there notices."""
        self._segment.begin()
        self._digests = {number: digest(self._buckets[number]) for number in self._buckets.fill(weights)}
        self._segment.end()

    def send(self, push: int) -> dict[int, bytes]:
        """See Sender: it is there."""
        return self._digests

    def admit(self, epoch: int, world_size: int) -> None:
        """See Sender: it is there for newcomers too."""

    def close(self) -> None:
        """See Sender."""
        self._segment.close()


class SharedBuckets:
    """A replica's view of what all senders share."""

    def __init__(self, numbers: list[int], manifest: Manifest) -> None:
        """Attaches to the senders' segments, in the order of the senders; RuntimeError if one is not here."""
        senders = len(numbers)
        self._segments = [
            Segment.attach(number, Buckets.size(manifest, sender, senders)) for sender, number in enumerate(numbers)
        ]
        self._parts = [
            Buckets(manifest, sender, senders, memory=segment.data) for sender, segment in enumerate(self._segments)
        ]
        self._read: list[int] = []

    def verify(self) -> str:
        """The checksum of what is there; RuntimeError while it is being written."""
        self._read = [segment.generation for segment in self._segments]
        if any(generation % 2 for generation in self._read):
            raise RuntimeError("the learner is writing other weights already")
        return checksum({number: digest(part[number]) for part in self._parts for number in part.numbers})

    def tensors(self) -> Weights:
        """The named tensors, in place."""
        for part in self._parts:
            yield from part.tensors()

    def check(self) -> None:
        """RuntimeError unless everything that was read since `verify` is what was verified."""
        if [segment.generation for segment in self._segments] != self._read:
            raise RuntimeError("the learner wrote other weights while these were loaded")
