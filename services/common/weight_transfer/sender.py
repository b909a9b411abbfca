"""The learner's end of a push: one interface, gloo and NCCL behind it."""

import socket
import threading
import time
from typing import Any, Protocol

import torch

from services.common.weight_transfer.buckets import Buckets, Weights, digest
from services.common.weight_transfer.filling import Filling
from services.common.weight_transfer.gloo import SENDER, GlooGroup, serve_store
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.shared import SharedSender


class Sender(Protocol):
    """Sends its share of the weights to every member of an epoch's group."""

    keeps_copy: bool
    """What was loaded stays as it was while the model is trained on."""

    def rendezvous(self) -> int:
        """Port, on the learner's host, at which the members of the next group meet; or whatever number they go by."""

    def join(self, epoch: int, world_size: int) -> None:
        """Forms the epoch's group; returns when all members have joined, RuntimeError if they do not."""

    def load(self, weights: Weights, push: int) -> None:
        """Takes the weights of this push, which are sent from now on; consumes all of them, whatever happens."""

    def send(self, push: int) -> dict[int, bytes]:
        """Sends the weights of this push; the digest of each bucket by its number, none where receivers keep none.

        Raises:
            RuntimeError: a member is gone or makes no progress. The group is closed.
        """

    def admit(self, epoch: int, world_size: int) -> None:
        """Sends what is loaded to a group of newcomers; the main group stays."""

    def close(self) -> None:
        """Leaves the group."""


class GlooSender:
    """For CPUs, and for GPUs without NCCL. Keeps what it sent in host memory, for those that join later.

    `send` may run beside `load`, in another thread: each bucket is sent as soon as it is full.
    """

    keeps_copy = True

    def __init__(self, manifest: Manifest, *, host: str, stall_s: float, sender: int = 0, senders: int = 1) -> None:
        self._host = host
        self._stall_s = stall_s
        self._store = serve_store(host, stall_s)
        self._buckets = Buckets(manifest, sender, senders)
        # Newcomers are served beside the training thread; a push must not overwrite what they are being sent.
        self._in_use = threading.Lock()
        self._filling = Filling()
        # One that was given up may still be sending when the next group is to be formed.
        self._line = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._group: GlooGroup | None = None

    def rendezvous(self) -> int:
        """See Sender: one store for all epochs."""
        return int(self._store.port)

    def join(self, epoch: int, world_size: int) -> None:
        """See Sender."""
        with self._line:
            self.close()
            self._group = self._form(epoch, world_size)

    def _form(self, epoch: int, world_size: int) -> GlooGroup:
        return GlooGroup(
            self._store,
            host=self._host,
            rank=SENDER,
            world_size=world_size,
            epoch=epoch,
            timeout_s=self._stall_s,
        )

    def load(self, weights: Weights, push: int) -> None:
        """See Sender. A copy: newcomers can have it while the model itself is half-way through an update."""
        with self._in_use:
            self._filling.begin(push)
            try:
                for number in self._buckets.fill(weights):
                    self._digests[number] = digest(self._buckets[number])
                    self._filling.full(number)
            finally:
                self._filling.end()

    def send(self, push: int) -> dict[int, bytes]:
        """See Sender."""
        with self._line:
            if self._group is None:
                raise RuntimeError("no transfer group: join comes before send")
            try:
                for number in self._buckets.numbers:
                    self._filling.wait(push, number, self._stall_s)
                    self._group.broadcast(self._buckets[number])
            except BaseException:
                # Members that still wait for a bucket fail at once when the sender leaves.
                self.close()
                raise
        return dict(self._digests)

    def admit(self, epoch: int, world_size: int) -> None:
        """See Sender."""
        group = self._form(epoch, world_size)
        try:
            with self._in_use:
                for number in self._buckets.numbers:
                    group.broadcast(self._buckets[number])
        finally:
            group.close()

    def close(self) -> None:
        """See Sender."""
        if self._group is not None:
            self._group.close()
            self._group = None


class NCCLSender:
    """For NVIDIA GPUs: rank 0 of the group that vLLM's own nccl engine joins, packed as that engine unpacks.

    NCCL has no deadline of its own. A watchdog aborts the communicator when a push makes no progress.
    """

    keeps_copy = False

    def __init__(self, manifest: Manifest, *, host: str, stall_s: float) -> None:
        self._manifest = manifest
        self._host = host
        self._stall_s = stall_s
        self._weights: list[tuple[str, torch.Tensor]] = []
        self._group: Any = None
        self._port = 0

    def rendezvous(self) -> int:
        """See Sender: a new port for each group, since vLLM keeps the old one's listener for as long as it lives."""
        self._port = _free_port(self._host)
        return self._port

    def join(self, epoch: int, world_size: int) -> None:
        """See Sender."""
        self.close()
        self._group = self._form(world_size)

    def _form(self, world_size: int) -> Any:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        return trainer_init({"master_address": self._host, "master_port": self._port, "world_size": world_size})

    def load(self, weights: Weights, push: int) -> None:
        """See Sender. No copy: a GPU has no room for one."""
        self._weights = [(name, tensor.detach()) for name, tensor in weights]

    def send(self, push: int) -> dict[int, bytes]:
        """See Sender. vLLM's engine keeps no checksum."""
        try:
            self._broadcast(self._group)
        except BaseException:
            self.close()
            raise
        return {}

    def admit(self, epoch: int, world_size: int) -> None:
        """See Sender."""
        group = self._form(world_size)
        try:
            self._broadcast(group)
        finally:
            group.destroy()

    def _broadcast(self, group: Any) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        with Watchdog(self._stall_s, lambda: group.nccl.ncclCommAbort(group.comm)) as watchdog:
            packed_nccl_broadcast_producer(
                iterator=iter(watchdog.watched(self._weights)),
                group=group,
                src=SENDER,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=self._manifest.bucket_bytes,
            )
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """See Sender."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


class Watchdog:
    """Calls `abort` from a thread of its own when nothing has moved for `stall_s` seconds."""

    def __init__(self, stall_s: float, abort: Any) -> None:
        self._stall_s = stall_s
        self._abort = abort
        self._moved = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="push watchdog")
        self.barked = False

    def watched(self, items: Weights) -> Weights:
        """The same items; each one that is asked for is progress."""
        for item in items:
            self._moved = time.monotonic()
            yield item
        self._moved = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(max(0.0, self._moved + self._stall_s - time.monotonic())):
            if time.monotonic() - self._moved >= self._stall_s:
                self.barked = True
                self._abort()
                return

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.barked:
            raise RuntimeError(f"nothing moved for {self._stall_s:g} s: a member of the group is stuck or gone")


def _free_port(host: str) -> int:
    """A port that is free now; vLLM's rendezvous opens it itself."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def make_sender(
    backend: str, manifest: Manifest, *, host: str, stall_s: float, sender: int = 0, senders: int = 1
) -> Sender:
    """The sender for the backend that the rollout replicas were started with."""
    if backend == "nccl" and senders == 1:
        return NCCLSender(manifest, host=host, stall_s=stall_s)
    if backend == "gloo":
        return GlooSender(manifest, host=host, stall_s=stall_s, sender=sender, senders=senders)
    if backend == "ipc":
        return SharedSender(manifest, sender=sender, senders=senders)
    raise ValueError(f"weights.backend: {backend!r} with {senders} senders; nccl takes one, gloo and ipc any number")
