"""Gloo process groups between the learner and the rollout workers, apart from torch's default group.

Each epoch of the membership is a fresh group under a prefix of one long-lived store, so that re-forming
costs milliseconds and a late member of an old epoch meets nobody.
"""

import socket
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

SENDER = 0
"""The learner's rank in every group."""


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """The rendezvous store, listening on a free port of `host` only (TCPStore by itself takes all interfaces)."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The sender's store, as a member sees it."""
    return TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def turned(rank: int, *, world_size: int, sender: int, senders: int) -> int:
    """A worker's rank in one sender's group, given its rank among all.

    Broadcasts go down a tree, in which some ranks pass on and most only receive. Turned from sender to sender, the
    passing on falls to other workers each time.
    """
    workers = world_size - 1
    return 1 + (rank - 1 + sender * workers // senders) % workers


class GlooGroup:
    """One epoch's group. Every operation raises RuntimeError after the timeout instead of hanging."""

    def __init__(
        self, store: TCPStore, *, host: str, rank: int, world_size: int, epoch: int, timeout_s: float
    ) -> None:
        """Joins the group; returns when all `world_size` members have.

        Args:
            store: the rendezvous of all epochs.
            host: this member's own address, on which its connections listen.
            rank: 0 for the sender.
            world_size: sender and workers.
            epoch: which membership this is.
            timeout_s: of joining and of each broadcast.

        Raises:
            RuntimeError: not all members came in time.
        """
        self.timeout = timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()
        options._timeout = self.timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(
            PrefixStore(f"epoch{epoch}", store), rank, world_size, options
        )

    def broadcast(self, data: torch.Tensor) -> None:
        """Sends `data` from the sender to everyone, or receives into it. Blocks; RuntimeError on failure."""
        if self._group is None:
            raise RuntimeError("this member has left the group")
        options = BroadcastOptions()
        options.rootRank = SENDER
        options.rootTensor = 0
        options.timeout = self.timeout
        self._group.broadcast([data], options).wait(self.timeout)

    def close(self) -> None:
        """Leaves the group; pending operations fail on all members."""
        if self._group is not None:
            self._group.abort()
            # Only its end closes the connections, which is what the others notice. An exception on its way out may
            # still hold on to this object, so the group cannot be left to go with it.
            self._group = None
