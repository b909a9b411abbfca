"""The learner's end of a push: one interface, implemented for process groups and for shared memory."""

import threading
from collections import deque
from typing import Protocol

import torch

from quartet.models.device import default_device
from quartet.weight_transfer.groups.group import SENDER, Group, Wire, give_up
from quartet.weight_transfer.groups.wires import make_wire
from quartet.weight_transfer.ipc import SharedSender
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.meeting import open_store
from quartet.weight_transfer.memory.buckets import Buckets, Weights, digest
from quartet.weight_transfer.memory.device_digest import device_digest
from quartet.weight_transfer.memory.device_memory import Cuda
from quartet.weight_transfer.memory.filling import Filling


class Sender(Protocol):
    """Sends its share of the weights to every member of a group, from a copy, so that training may change the model
    meanwhile."""

    def rendezvous(self) -> int:
        """Number by which the members of all groups find the sender: of its store, a port unless it is on loopback,
        or of its shared memory."""

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
        """Ends the transfer to this membership, so that no member waits for another that is gone. May overlap `join`
        and `send`."""

    def add_newcomers(self, membership: int, world_size: int) -> None:
        """Sends the loaded weights to a group of newcomers; the main group stays as it is."""

    def close(self) -> None:
        """Leaves the group."""


AHEAD = 2
"""Packed buckets that stay on the GPU until they are sent, where the sender's copy is in host memory."""


class GroupSender:
    """Broadcasts to a process group, by gloo or NCCL, from a copy that is kept for later newcomers.

    `send` may run in another thread beside `load`: each bucket is sent as soon as it is full. A wire that reads a
    GPU's memory gets each bucket from where it was packed. If the copy is in host memory, buckets that are sent later
    than AHEAD others were packed, or to newcomers, are copied back to the GPU.
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
        on_gpu: bool = False,
    ) -> None:
        """Makes the buckets and the store. `device` is the weights' device, as for Buckets; with `on_gpu` the copy is
        in memory of the wire's GPU, if it has one."""
        self._wire = wire
        self._digest = digest if wire.device is None else device_digest
        self._stall_s = stall_s
        self._store, self._number = open_store(host, stall_s)
        self._aside = self._store.clone()  # a TCPStore answers nothing else while it waits for a member's key
        if on_gpu and wire.device is not None:
            memory = torch.empty(Buckets.size(manifest, sender, senders), dtype=torch.uint8, device=wire.device)
            self._buckets = Buckets(manifest, sender, senders, memory=memory)
        else:
            self._buckets = Buckets(manifest, sender, senders, device=device)
        self._ahead: deque[tuple[int, torch.Tensor]] = deque(maxlen=AHEAD)
        self._over: int | None = None
        """The push whose sending has ended, while its weights may still be loaded."""
        # Newcomers are served beside the training thread; a push must not overwrite the buckets they are being sent.
        self._in_use = threading.Lock()
        self._filling = Filling()
        # An abandoned send may still be running when the next group is formed.
        self._line = threading.Lock()
        self._digests: dict[int, bytes] = {}
        self._group: Group | None = None
        self._newcomers: Group | None = None

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
            self._over = None
            self._ahead.clear()
            self._filling.begin(push)
            try:
                for number, packed in self._buckets.fill(weights):
                    carried = self._buckets[number] if self._wire.device is None else packed
                    self._digests[number] = self._digest(carried)
                    if carried is not self._buckets[number]:
                        self._ahead.append((number, carried))
                        if self._over == push:  # after the append, so that one of both threads clears it
                            self._ahead.clear()
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
                    self._group.broadcast(self._carried(number))
            except BaseException:
                # Members that still wait for a bucket fail when the sender leaves.
                self.close()
                raise
            finally:
                self._over = push
                self._ahead.clear()
        return dict(self._digests)

    def _carried(self, number: int) -> torch.Tensor:
        """The bytes of a bucket in memory that the wire reads."""
        ahead = dict(list(self._ahead)).get(number)  # a copy first: `load` adds to it meanwhile
        if ahead is not None or self._wire.device is None:
            return self._buckets[number] if ahead is None else ahead
        return self._buckets[number].to(self._wire.device, non_blocking=True)

    def abandon(self, membership: int) -> None:
        """Leaves the group, which also ends a `join`, a `send` or an `add_newcomers` that is waiting for a member."""
        give_up(self._aside, membership)
        group, newcomers = self._group, self._newcomers
        if group is not None and group.membership == membership:
            self.close()
        elif newcomers is not None and newcomers.membership == membership:
            newcomers.abandon()

    def add_newcomers(self, membership: int, world_size: int) -> None:
        """Forms a second group with the newcomers, sends all buckets, and leaves it."""
        self._newcomers = group = self._form(membership, world_size)
        try:
            with self._in_use:
                for number in self._buckets.numbers:
                    group.broadcast(self._carried(number))
        finally:
            self._newcomers = None
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
    on_gpu: bool = False,
    cuda: Cuda | None = None,
) -> Sender:
    """The sender for a backend. `on_gpu` keeps NCCL's copy of the weights on the GPU; `cuda` is the runtime for GPU
    memory, None for torch's.

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
        on_gpu=on_gpu,
    )
