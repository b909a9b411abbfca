"""A worker's end of a push: one interface, implemented for process groups and for shared memory."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from quartet.weight_transfer.groups.group import ABORT_S, LOOK_S, Group, Wire, leave, turned
from quartet.weight_transfer.groups.wires import make_wire
from quartet.weight_transfer.ipc import SharedBuckets
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.meeting import find_store, own_address
from quartet.weight_transfer.memory.buckets import Buckets, checksum, digest
from quartet.weight_transfer.memory.device_digest import device_digest
from quartet.weight_transfer.memory.device_memory import Cuda
from quartet.weight_transfer.memory.pinning import READ_ONLY, pin
from quartet.weight_transfer.memory.shared_memory import Segment
from quartet.weight_transfer.pieces import Pieces, StagedPieces, cut

log = logging.getLogger("quartet")

Wires = Callable[[str, str, torch.device, float], Wire]
"""Makes the wire of a backend for a member with this address and device, and with `stall_s`, as `make_wire` does."""

Bucket = tuple[range, torch.Tensor]
"""The numbers of a bucket's tensors in the manifest, and its bytes: uint8, [bytes of the bucket]."""


@dataclass
class Joining:
    """Everything that a worker needs to join the members of a push."""

    backend: str
    """Name of the backend: gloo, nccl, ipc or cuda-ipc."""
    senders: list[list[Any]]
    """Address of each sender, and the number by which `find_store` finds its store, or with ipc and cuda-ipc that of
    its shared memory."""
    rank: int
    """The worker's rank among sender and workers."""
    world_size: int
    membership: int
    stall_s: float
    """Longest wait, in seconds, for the group to form, and for one bucket."""
    until: float = math.inf
    """Time at which the others stop waiting for the group to form, in seconds of time.monotonic() on the worker's
    machine, which its replica shares. A worker that comes to it late, as it was busy, gives up then too, and is free
    for the next attempt instead of always one behind."""
    on_gpu: bool = False
    """True to stage what NCCL receives in memory of the worker's GPU, False in host memory."""
    worker: int = 0
    """Number of the worker in its replica."""
    workers: int = 1
    """Workers of the replica, all on one machine. They share what is staged in host memory."""

    @property
    def joining_s(self) -> float:
        """Seconds that are left for the group to form."""
        return min(self.stall_s, self.until - time.monotonic())


class Receiver(Protocol):
    """Takes the weights of one push after another, from the senders of a membership."""

    def join(self, joining: Joining) -> None:
        """Joins the members, leaving the group before; RuntimeError if not all members come in time."""

    def receive(self, manifest: Manifest, pieces: Pieces | None = None) -> str:
        """Receives all buckets; returns the checksum of their bytes.

        Args:
            manifest: the tensors of the push.
            pieces: those of them that will be asked for, if no others are; all workers of the replica then have some.

        Raises:
            RuntimeError: a sender or another member is gone, or a bucket took longer than `stall_s`.
        """

    def buckets(self) -> Iterator[Bucket]:
        """The buckets received last, in order."""

    def weights(self, pieces: Pieces) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
        """The pieces of each weight received last."""

    def check(self) -> None:
        """Raises RuntimeError if the buckets changed after they were received."""

    def make_room(self, manifest: Manifest, pieces: Pieces | None = None) -> None:
        """Frees memory that `receive` would not use for these. With several workers it comes before, for all."""

    def close(self) -> None:
        """Leaves the group; memory that is kept from push to push stays."""


CARRIERS = 2
"""Buckets of each sender on the GPU at a time, if they are staged in host memory: one arrives while the one before is
copied."""


class GroupReceiver:
    """Receives from process groups, by gloo or NCCL, into a staging area. A group that breaks closes all of them.

    NCCL brings the buckets to the GPU, where they are hashed, and where they stay if they are staged there. Otherwise
    each is copied to host memory while the next one arrives.

    Of several workers of a replica each keeps its own pieces, once they are known. Before, the first one keeps the
    whole buckets, in host memory that it shares; the others hash what they receive, and load from there. All of them
    have made room before any of them receives, have received before any of them loads, and have loaded before any of
    them receives again.
    """

    def __init__(self, device: torch.device, wires: Wires = make_wire) -> None:
        """`device` is the model's device; `wires` makes the wire of a backend, as `make_wire` does."""
        self._device, self._wires = device, wires
        self._carrying: torch.device | None = None
        """The GPU to which the groups bring the buckets; None: they bring them to host memory."""
        self._staging: torch.device | None = None
        """The GPU in whose memory they are staged, if they are this worker's pieces or it is the only one; None: in
        host memory."""
        self._groups: list[Group] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        """The GPU's stream on which buckets of a sender are staged. Kept from push to push, since torch keeps what
        intermediate results took for the next ones of the same stream."""
        self._left = threading.Event()
        """Set when this member leaves its groups."""
        self._staged: Buckets | StagedPieces | None = None
        self._worker, self._workers = 0, 1
        self._segment: Segment | None = None
        """The memory that the replica's workers share; None: this one's is its own."""
        self._number = 0
        """The number that the first worker told of it."""
        self._loaded = 0
        """The generation of that memory that is being loaded."""
        self._received = 0
        """Pushes of this membership."""
        self._first = 0
        """Rank of the replica's first worker."""

    def join(self, joining: Joining) -> None:
        """Joins one group for each sender."""
        self._leave(min(ABORT_S, max(0.0, joining.joining_s)))
        wire = self._wires(joining.backend, own_address(joining.senders[0][0]), self._device, joining.stall_s)
        senders = len(joining.senders)
        self._carrying, staging = wire.device, wire.device if joining.on_gpu else None
        if (staging, joining.worker, joining.workers) != (self._staging, self._worker, self._workers):
            self._staged = self._segment = None
        self._staging, self._worker, self._workers = staging, joining.worker, joining.workers
        self._first, self._received = joining.rank - joining.worker, 0
        try:
            for sender, (address, number) in enumerate(joining.senders):
                joining_s = joining.joining_s
                if joining_s <= 0:
                    raise RuntimeError(
                        f"membership {joining.membership} was given up before this worker came to join it"
                    )
                store = find_store(address, number, joining_s)
                rank = turned(joining.rank, world_size=joining.world_size, sender=sender, senders=senders)
                place = {"rank": rank, "world_size": joining.world_size, "membership": joining.membership}
                self._groups.append(Group(store, wire, **place, timeout_s=joining.stall_s, joining_s=joining_s))
        except BaseException:
            self.close()  # nothing else makes this member leave the groups of the senders before
            raise
        self._left = threading.Event()
        threading.Thread(target=_heed, args=(self._groups, self._left), name="push abandoned", daemon=True).start()

    def receive(self, manifest: Manifest, pieces: Pieces | None = None) -> str:
        """Receives all buckets into the staging area; hashes and stages one while the next one arrives."""
        if not self._groups:
            raise RuntimeError("no transfer group: prepare comes before transfer")
        staged = self._prepared(manifest) if pieces is None else self._prepared_for(manifest, pieces)
        groups, senders = self._groups, len(self._groups)
        sizes = [sum(map(manifest.size, bucket)) for bucket in manifest.buckets()]
        writing = self._segment if self._worker == 0 else None
        only_hashed = self._segment is not None and self._worker > 0
        in_place = staged if isinstance(staged, Buckets) and not only_hashed and self._arrive_in_place else None
        take = None if only_hashed or in_place else staged.take

        def line(sender: int) -> dict[int, Future[bytes]]:
            digests: dict[int, Future[bytes]] = {}
            numbers = range(sender, len(sizes), senders)
            carriers = [] if in_place else self._carriers(max((sizes[number] for number in numbers), default=0))
            for turn, number in enumerate(numbers):
                if in_place:
                    arriving = in_place[number]
                else:
                    if turn >= len(carriers):
                        digests[numbers[turn - len(carriers)]].result()  # then its carrier is free
                    arriving = carriers[turn % len(carriers)][: sizes[number]]
                groups[sender].broadcast(arriving)
                stage = partial(self._staged_from, arriving, partial(take, number) if take else None)
                digests[number] = stagers.submit(self._beside(sender, arriving.device, stage))
            return digests

        with ThreadPoolExecutor(senders, "stage") as stagers, ThreadPoolExecutor(senders, "push") as lines:
            if writing is not None:
                writing.begin()
            coming = [lines.submit(line, sender) for sender in range(senders)]
            try:
                parts = [first.result() for first in as_completed(coming)]
            except BaseException:
                self.close()  # so that no thread keeps waiting for a bucket
                raise
            received = checksum({number: done.result() for part in parts for number, done in part.items()})
            if writing is not None:
                writing.end()
            return received

    def _prepared_for(self, manifest: Manifest, pieces: Pieces) -> StagedPieces:
        """The staging area for these pieces: that of the push before, if they are the same."""
        self.make_room(manifest, pieces)
        if self._staged is None:
            pinned = self._device.type == "cuda" and self._staging is None
            self._staged = StagedPieces(manifest, pieces, self._staging, pinned=pinned)
            self._settle()
        assert isinstance(self._staged, StagedPieces)
        return self._staged

    def _prepared(self, manifest: Manifest) -> Buckets:
        """The staging area for whole buckets: that of the push before, if the manifest is the same."""
        self._received += 1
        self.make_room(manifest)
        known, number = self._staged is not None, None
        if self._workers > 1:
            meeting, key = self._groups[0], f"staged {self._first} {self._received}"
            if self._worker == 0:
                if not known:
                    self._segment = _shared(Buckets.size(manifest))
                meeting.tell(key, str(self._segment.number if self._segment else 0))
            else:
                number = int(meeting.told(key))
                known = known and number == self._number
        if not known:
            self._staged = None  # frees the old memory before the new is allocated
            if number is not None:
                self._segment, self._number = None, number
                self._segment = _attached(number, Buckets.size(manifest)) if number else None
            self._staged = self._area(manifest)
        assert isinstance(self._staged, Buckets)
        return self._staged

    def _area(self, manifest: Manifest) -> Buckets:
        """Memory for all buckets: the workers' own, or new memory on the GPU or pinned on the host."""
        gpu = self._device if self._device.type == "cuda" else None
        if self._segment is not None and self._worker > 0:
            if gpu is not None:
                pin(self._segment.data, self._segment, flags=READ_ONLY)
            return Buckets(manifest, memory=self._segment.data)
        if self._staging is None or self._workers > 1:
            return Buckets(manifest, memory=self._segment.data if self._segment else None, device=gpu)
        memory = torch.empty(Buckets.size(manifest), dtype=torch.uint8, device=self._staging)
        self._settle()
        return Buckets(manifest, memory=memory)

    def _settle(self) -> None:
        """Waits until the GPU is done with what was in the memory of a new area: buckets come on other streams."""
        if self._staging is not None and self._staging.type == "cuda":
            torch.cuda.current_stream(self._staging).synchronize()

    @property
    def _arrive_in_place(self) -> bool:
        """True if whole buckets arrive where they are staged."""
        return self._carrying is None or (self._staging is not None and self._workers == 1)

    def _carriers(self, size: int) -> list[torch.Tensor]:
        """Memory in which buckets of up to `size` bytes arrive that do not stay there."""
        return [torch.empty(size, dtype=torch.uint8, device=self._carrying) for _ in range(CARRIERS)]

    def _staged_from(self, arrived: torch.Tensor, take: Callable[[torch.Tensor], None] | None) -> bytes:
        """Stages a bucket that has arrived, if it is not where it stays; returns its digest."""
        if take is not None:
            take(arrived)
        # As the sender computes it; on a GPU this waits for the copy as well.
        return digest(arrived) if self._carrying is None else device_digest(arrived)

    def _beside(self, sender: int, device: torch.device, work: Callable[[], bytes]) -> Callable[[], bytes]:
        """The work for another thread: on a GPU it comes after all that was given to this thread's stream so far, and
        beside all that will be, such as the arrival of the sender's next bucket."""
        if device.type != "cuda":
            return work
        if sender not in self._streams:
            self._streams[sender] = torch.cuda.Stream(device)
        stream, before = self._streams[sender], torch.cuda.Event()
        before.record(torch.cuda.current_stream(device))

        def done() -> bytes:
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                return work()

        return done

    def buckets(self) -> Iterator[Bucket]:
        """The received buckets, in host memory or on the GPU. RuntimeError if the first of several workers has not
        received them all."""
        assert isinstance(self._staged, Buckets)
        if self._segment is not None:
            self._loaded = self._segment.generation
            if self._loaded % 2:
                raise RuntimeError("the first worker of this replica has not received all weights")
        for number, bucket in enumerate(self._staged.ranges):
            yield bucket, self._staged[number]

    def weights(self, pieces: Pieces) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
        """The pieces of each received weight, in host memory or on the GPU. Raises like `buckets`."""
        if isinstance(self._staged, StagedPieces):
            return self._staged.weights()
        assert self._staged is not None
        return cut(self._staged.manifest, self.buckets(), pieces)

    def make_room(self, manifest: Manifest, pieces: Pieces | None = None) -> None:
        """Frees the staging area unless it is one for these."""
        staged = self._staged
        if isinstance(staged, StagedPieces):
            fits = (staged.manifest, staged.pieces) == (manifest, pieces)
        else:
            fits = staged is not None and staged.manifest == manifest and pieces is None
        if not fits:
            self._staged = self._segment = None

    def check(self) -> None:
        """Raises RuntimeError if the first of several workers has received other weights since `buckets`."""
        if self._segment is not None and self._segment.generation != self._loaded:
            raise RuntimeError("the first worker of this replica received other weights while these were loaded")

    def close(self) -> None:
        """Leaves all groups."""
        self._leave(ABORT_S)

    def _leave(self, seconds: float) -> None:
        self._left.set()
        groups, self._groups = self._groups, []
        leave(groups, seconds)


def _shared(size: int) -> Segment | None:
    """Memory for several workers; None if the machine has too little that can be shared."""
    try:
        return Segment.create(size)
    except RuntimeError as error:
        log.warning("each worker stages weights of its own, as they cannot be shared: %s", error)
        return None


def _attached(number: int, size: int) -> Segment | None:
    """The first worker's memory; None if this process cannot open it."""
    try:
        return Segment.attach(number, size)
    except RuntimeError as error:
        log.warning("this worker stages weights of its own, as it cannot open those of the first one: %s", error)
        return None


def _heed(groups: Sequence[Group], left: threading.Event) -> None:
    """Leaves the groups when their sender abandons them, as other members may be waiting for this one meanwhile."""
    # Without its store the sender is dead, and broadcasts fail by themselves.
    with contextlib.suppress(RuntimeError):
        while not left.wait(LOOK_S):
            if groups[0].abandoned:
                leave(groups)
                return


class SharedReceiver:
    """Reads the shared memory of senders on the same machine or GPU, without a copy: until they are loaded, the
    weights stay in the learner's memory."""

    def __init__(self, attach: Callable[[list[int], Manifest], SharedBuckets]) -> None:
        """`attach` opens the senders' memory."""
        self._attach = attach
        self._segments: list[int] = []
        self._shared: SharedBuckets | None = None
        self._manifest: Manifest | None = None

    def join(self, joining: Joining) -> None:
        """Remembers the senders' addresses; their memory is attached once the manifest gives its size."""
        self.close()
        self._segments = [port for _, port in joining.senders]

    def receive(self, manifest: Manifest, pieces: Pieces | None = None) -> str:
        """Verifies the shared weights; RuntimeError if they are not on this machine, or have changed since the
        push."""
        if self._shared is None or self._manifest != manifest:
            self._shared, self._manifest = self._attach(self._segments, manifest), manifest
        return self._shared.verify()

    def buckets(self) -> Iterator[Bucket]:
        """The buckets in shared memory."""
        assert self._shared is not None
        return self._shared.buckets()

    def weights(self, pieces: Pieces) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
        """The pieces of each weight in shared memory."""
        assert self._manifest is not None
        return cut(self._manifest, self.buckets(), pieces)

    def make_room(self, manifest: Manifest, pieces: Pieces | None = None) -> None:
        """Does nothing: the memory is the learner's."""

    def check(self) -> None:
        """Raises RuntimeError if the learner has written other weights since `receive`."""
        assert self._shared is not None
        self._shared.check()

    def close(self) -> None:
        """Detaches from the shared memory."""
        if self._shared is not None:
            self._shared.close()
        self._segments, self._shared = [], None


def make_receiver(backend: str, device: torch.device, cuda: Cuda | None = None) -> Receiver:
    """The receiver for a backend, of a worker whose model is on `device`. `cuda` is the runtime for GPU memory; None
    for torch's.

    Raises:
        ValueError: cuda-ipc without a GPU.
    """
    if backend == "ipc":
        return SharedReceiver(partial(SharedBuckets.host, device=device))
    if backend != "cuda-ipc":
        return GroupReceiver(device)
    if device.type != "cuda" and cuda is None:
        raise ValueError("weights.backend: cuda-ipc, but this process has no GPU")
    return SharedReceiver(partial(SharedBuckets.gpu, device=device, cuda=cuda))
