"""vLLM's side of a push by gloo or through shared memory.

The gloo engine stages, then swaps; or streams, when asked to.

vLLM's nccl engine writes each bucket into the model as it comes. Staging keeps all of them beside the model until
`finish`, so that a transfer which breaks off leaves the serving weights whole, at the price of one more copy of the
weights in host memory, kept from push to push. Streaming needs no copy, and a transfer that breaks off leaves a
model that can do nothing but receive again.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from services.common.weight_transfer.buckets import Buckets, checksum, digest
from services.common.weight_transfer.gloo import GlooGroup, reach_store, turned
from services.common.weight_transfer.loading import LoadingEngine, PackedUpdateInfo
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.shared import SharedBuckets


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins: the senders' stores, and the worker's place in their groups."""

    senders: list[list[Any]]
    """[address, port] of each sender's store."""
    rank_offset: int
    world_size: int
    epoch: int
    host: str
    stall_s: float
    streaming: bool


class GlooWeightTransferEngine(LoadingEngine[GlooInitInfo]):
    """Registered with vLLM as the backend `gloo` (see plugin.py)."""

    init_info_cls = GlooInitInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: list[GlooGroup] = []
        self._streaming = False
        self._staged: Buckets | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the epoch's groups, leaving those before."""
        self.shutdown()
        self._streaming = init_info.streaming
        rank = init_info.rank_offset + self.parallel_config.rank
        for sender, (address, port) in enumerate(init_info.senders):
            place = {"world_size": init_info.world_size, "sender": sender, "senders": len(init_info.senders)}
            self._groups.append(
                GlooGroup(
                    reach_store(address, port, init_info.stall_s),
                    host=init_info.host,
                    rank=turned(rank, **place),
                    world_size=init_info.world_size,
                    epoch=init_info.epoch,
                    timeout_s=init_info.stall_s,
                )
            )

    def start_weight_update(self) -> None:
        """Staged, the model is untouched until finish; streaming, it is taken apart here."""
        if self._streaming:
            self._take_apart()

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Receives every bucket and hashes what came.

        Raises:
            RuntimeError: the sender or another member is gone, or no bucket came for too long.
        """
        if not self._groups:
            raise RuntimeError("no transfer group: prepare comes before transfer")
        manifest = Manifest.from_fields(vars(update_info))
        try:
            self.checksum = self._stream(manifest) if self._streaming else self._stage(manifest)
        except BaseException:
            self.shutdown()
            raise

    def _stage(self, manifest: Manifest) -> str:
        if self._staged is None or self._staged.manifest != manifest:
            self._staged = None  # the old memory goes before the new comes
            self._staged = Buckets(manifest)
        buckets, senders = self._staged, len(self._groups)

        def receive(sender: int) -> dict[int, bytes]:
            digests = {}
            for number in buckets.numbers[sender::senders]:
                self._groups[sender].broadcast(buckets[number])
                digests[number] = hasher.submit(digest, buckets[number])
            return {number: future.result() for number, future in digests.items()}

        # Hashing one bucket takes place while the next one comes in.
        with ThreadPoolExecutor(1, "hash") as hasher, ThreadPoolExecutor(senders, "push") as lines:
            parts = _all_or_close([lines.submit(receive, sender) for sender in range(senders)], self._groups)
        return checksum({number: found for part in parts for number, found in part.items()})

    def _stream(self, manifest: Manifest) -> str:
        digests = {}
        with ThreadPoolExecutor(1, "push") as line:
            for number, bucket, data in self._arriving(manifest, line):
                digests[number] = digest(data)
                self._load(manifest.cut(bucket, data))
        return checksum(digests)

    def _arriving(self, manifest: Manifest, line: ThreadPoolExecutor) -> Iterator[tuple[int, range, torch.Tensor]]:
        """Each bucket; the next one comes in while the caller loads this one."""

        def receive(number: int, bucket: range) -> tuple[int, range, torch.Tensor]:
            # Fresh memory: vLLM holds on to tensors until their layer is complete.
            data = torch.empty(sum(manifest.size(index) for index in bucket), dtype=torch.uint8)
            self._groups[number % len(self._groups)].broadcast(data)
            return number, bucket, data

        coming: Future[tuple[int, range, torch.Tensor]] | None = None
        for number, bucket in enumerate(manifest.buckets()):
            following = line.submit(receive, number, bucket)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()

    def finish_weight_update(self) -> None:
        """Swaps the staged weights in, or closes what was streamed."""
        if not self._streaming:
            assert self._staged is not None
            self._take_apart()
            self._load(self._staged.tensors())
        self._put_together()
        self._broken = False

    def shutdown(self) -> None:
        """Leaves the group."""
        for group in self._groups:
            group.close()
        self._groups = []


@dataclass
class SharedInitInfo(WeightTransferInitInfo):
    """Whose memory to read."""

    segments: list[int]
    """Each sender's."""


class SharedWeightTransferEngine(LoadingEngine[SharedInitInfo]):
    """Registered with vLLM as the backend `quartet-ipc`: what `ipc` is in Quartet. Stages nothing: until `finish`
    the weights stay in the learner's memory."""

    init_info_cls = SharedInitInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._segments: list[int] = []
        self._shared: SharedBuckets | None = None
        self._manifest: Manifest | None = None

    def init_transfer_engine(self, init_info: SharedInitInfo) -> None:
        """Remembers where; the manifest says how much."""
        self.shutdown()
        self._segments = init_info.segments

    def start_weight_update(self) -> None:
        """Leaves the model untouched."""

    def receive_weights(self, update_info: PackedUpdateInfo) -> None:
        """Hashes what is there; RuntimeError if it is not on this machine, or no longer what was pushed."""
        manifest = Manifest.from_fields(vars(update_info))
        if self._shared is None or self._manifest != manifest:
            self._shared, self._manifest = SharedBuckets(self._segments, manifest), manifest
        self.checksum = self._shared.verify()

    def finish_weight_update(self) -> None:
        """Loads; RuntimeError, and a model that can do nothing but receive again, if the learner wrote meanwhile."""
        assert self._shared is not None
        self._take_apart()
        self._load(self._shared.tensors())
        self._shared.check()
        self._put_together()
        self._broken = False

    def shutdown(self) -> None:
        """Lets go of the memory."""
        self._segments, self._shared = [], None


def _all_or_close(futures: list[Future[Any]], groups: list[GlooGroup]) -> list[Any]:
    """All results; at the first failure every group is closed, so that no thread waits for a bucket any more."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for group in groups:
            group.close()
        raise


class WorkerExtension:
    """Methods that vLLM adds to its workers, for what its own weight-transfer calls leave out."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def weights_checksum(self) -> str:
        """Of the bytes this worker received last; empty where the backend keeps none."""
        return str(getattr(self.weight_transfer_engine, "checksum", ""))

    def abort_weight_update(self) -> bool:
        """Ends a push without its weights; whether the model is whole, with the weights it had."""
        begun, self._weight_update_active = self._weight_update_active, False
        if hasattr(self.weight_transfer_engine, "discard"):
            return bool(self.weight_transfer_engine.discard())
        self.weight_transfer_engine.shutdown()
        # vLLM's own engines take the model apart at the start of an update.
        return not begun
