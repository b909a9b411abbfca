"""The learner's end of a push: one interface, implemented for process groups and for shared memory."""

import threading
from typing import Protocol

import torch

from services.common.models.device import default_device
from services.common.weight_transfer.groups.group import SENDER, Group, Wire
from services.common.weight_transfer.groups.wires import make_wire
from services.common.weight_transfer.ipc import SharedSender
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.meeting import open_store
from services.common.weight_transfer.memory.buckets import Buckets, Weights, digest
from services.common.weight_transfer.memory.device_memory import Cuda
from services.common.weight_transfer.memory.filling import Filling


class Sender(Protocol):
    """Sends its share of the weights to every member of a group, from a copy, so that training may change the model
    meanwhile."""

    def rendezvous(self) -> int:
        """Number by which the members of the next group find the sender: of its store, a port unless it is on
        loopback, or of its shared memory."""

    def join(self, membership: int, world_size: int) -> None:
        """Forms a new group; returns when all members have joined, RuntimeError if they do not."""

    def load(self, weights: Weights, push: int) -> None:
        """Copies the weights of this push, which are sent from now on; consumes all of them even on failure."""

    def send(self, push: int) -> dict[int, bytes]:
        """Sends the weights of this push; returns bucket number -> digest, empty if the receivers compute no digests.

        Raises:
            RuntimeError: a member is gone or makes no progress. The group is then closed.
        """

    def abandon(self, membership: int) -> None:
        """Ends the transfer to this membership, so that no member waits for another that is gone. May overlap
        `send`."""

    def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends the loaded weights to a group of newcomers; the main group stays as it is."""

    def close(self) -> None:
        """Leaves the group."""


class GroupSender:
    """Broadcasts to a process group, by gloo or NCCL, from a copy in host memory, which is kept for later newcomers.

    `send` may run in another thread beside `load`: each bucket is sent as soon as it is full.
    """

    def __init__(
        self,
        manifest: Manifest,
        wire: Wire,
        *,
        host: str,
        stall_s: float,
        sender: int = 0,
        senders: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """Makes the buckets and the store. `device` is the weights' device, as for Buckets."""
        self._wire = wire
        self._stall_s = stall_s
        self._store, self._number = open_store(host, stall_s)
        self._buckets = Buckets(manifest, sender, senders, device=device)
        # Newcomers are served beside the training thread; a push must not overwrite the buckets they are being sent.
        self._in_use = threading.Lock()
        self._filling = Filling()
        # An abandoned send may still be running when the next group is formed.
        self._line = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._group: Group | None = None

    def rendezvous(self) -> int:
        """The number of the store, which is the same for all groups."""
        return self._number

    def join(self, membership: int, world_size: int) -> None:
        """Forms the group, leaving the one before."""
        with self._line:
            self.close()
            self._group = self._form(membership, world_size)

    def _form(self, membership: int, world_size: int) -> Group:
        place = {"rank": SENDER, "world_size": world_size, "membership": membership}
        return Group(self._store, self._wire, **place, timeout_s=self._stall_s)

    def load(self, weights: Weights, push: int) -> None:
        """Copies the weights into the buckets, so that newcomers can get them while the model is being updated."""
        with self._in_use:
            self._filling.begin(push)
            try:
                for number in self._buckets.fill(weights):
                    self._digests[number] = digest(self._buckets[number])
                    self._filling.full(number)
            finally:
                self._filling.end()

    def send(self, push: int) -> dict[int, bytes]:
        """Broadcasts each bucket as soon as it is full; returns the digests."""
        with self._line:
            if self._group is None:
                raise RuntimeError("no transfer group: join comes before send")
            try:
                for number in self._buckets.numbers:
                    self._filling.wait(push, number, self._stall_s)
                    self._group.broadcast(self._buckets[number])
            except BaseException:
                # Members that still wait for a bucket fail when the sender leaves.
                self.close()
                raise
        return dict(self._digests)

    def abandon(self, membership: int) -> None:
        """Leaves the group, which also ends a `send` that is waiting for a member."""
        group = self._group
        if group is not None and group.membership == membership:
            self.close()

    def add_newcomers(self, membership: int, world_size: int) -> None:
        """Forms a second group with the newcomers, sends all buckets, and leaves it."""
        group = self._form(membership, world_size)
        try:
            with self._in_use:
                for number in self._buckets.numbers:
                    group.broadcast(self._buckets[number])
        finally:
            group.close()

    def close(self) -> None:
        """Leaves the group; its members learn that nothing more comes. Callable from any thread."""
        group, self._group = self._group, None
        if group is not None:
            group.abandon()


def make_sender(
    backend: str,
    manifest: Manifest,
    *,
    host: str,
    stall_s: float,
    sender: int = 0,
    senders: int = 1,
    cuda: Cuda | None = None,
) -> Sender:
    """The sender for a backend. `cuda` is the runtime for GPU memory; None for torch's.

    Raises:
        ValueError: nccl or cuda-ipc without a GPU, or an unknown backend.
    """
    device = default_device()
    gpu = device if device.type == "cuda" else None
    if backend == "ipc":
        return SharedSender.host(manifest, sender=sender, senders=senders, device=gpu)
    if backend == "cuda-ipc":
        if gpu is None and cuda is None:
            raise ValueError("weights.backend: cuda-ipc, but this process has no GPU")
        return SharedSender.gpu(manifest, device, sender=sender, senders=senders, cuda=cuda)
    return GroupSender(
        manifest,
        make_wire(backend, host, device, stall_s),
        host=host,
        stall_s=stall_s,
        sender=sender,
        senders=senders,
        device=gpu,
    )
