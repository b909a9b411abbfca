"""The learner's end of a push: one interface, gloo and NCCL behind it."""

import hashlib
import socket
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from services.common.weight_transfer.gloo import SENDER, GlooGroup, serve_store
from services.common.weight_transfer.manifest import Manifest, fill


class Sender(Protocol):
    """Sends weights to every member of an epoch's group."""

    def rendezvous(self) -> int:
        """Port, on the learner's host, at which the members of the next group meet."""

    def join(self, epoch: int, world_size: int) -> None:
        """Forms the epoch's group; returns when all members have joined, RuntimeError if they do not."""

    def send(self, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> str:
        """Sends everything in manifest order; the checksum of what was sent, empty where receivers keep none."""

    def close(self) -> None:
        """Leaves the group."""


class GlooSender:
    """For CPUs, and for GPUs without NCCL."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._store = serve_store(host, timeout_s)
        self._group: GlooGroup | None = None

    def rendezvous(self) -> int:
        """See Sender: one store for all epochs."""
        return int(self._store.port)

    def join(self, epoch: int, world_size: int) -> None:
        """See Sender."""
        self.close()
        self._group = GlooGroup(
            self._store,
            host=self._host,
            rank=SENDER,
            world_size=world_size,
            epoch=epoch,
            timeout_s=self._timeout_s,
        )

    def send(self, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> str:
        """See Sender. The sha256 is what every receiver must have computed too."""
        if self._group is None:
            raise RuntimeError("no transfer group: join comes before send")
        digest = hashlib.sha256()
        ordered = [tensors[name] for name in manifest.names]
        for bucket in manifest.buckets():
            data = fill(bucket, ordered).cpu()
            self._group.broadcast(data)
            digest.update(memoryview(data.numpy()))
        return digest.hexdigest()

    def close(self) -> None:
        """See Sender."""
        if self._group is not None:
            self._group.close()
            self._group = None


class NCCLSender:
    """For NVIDIA GPUs: rank 0 of the group that vLLM's own nccl engine joins, packed as that engine unpacks."""

    def __init__(self, host: str, bucket_bytes: int) -> None:
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._group: Any = None
        self._port = 0

    def rendezvous(self) -> int:
        """See Sender: a new port for each group, since vLLM keeps the old one's listener for as long as it lives."""
        self._port = _free_port(self._host)
        return self._port

    def join(self, epoch: int, world_size: int) -> None:
        """See Sender."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.close()
        self._group = trainer_init(
            {"master_address": self._host, "master_port": self._port, "world_size": world_size}
        )

    def send(self, tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> str:
        """See Sender. vLLM's engine keeps no checksum."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter([(name, tensors[name].detach()) for name in manifest.names]),
            group=self._group,
            src=SENDER,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._bucket_bytes,
        )
        torch.cuda.current_stream().synchronize()
        return ""

    def close(self) -> None:
        """See Sender."""
        if self._group is not None:
            self._group.destroy()
            self._group = None


def _free_port(host: str) -> int:
    """A port that is free now; vLLM's rendezvous opens it itself."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def make_sender(backend: str, *, host: str, bucket_bytes: int, timeout_s: float) -> Sender:
    """The sender for the backend that the rollout replicas were started with."""
    if backend == "nccl":
        return NCCLSender(host, bucket_bytes)
    if backend == "gloo":
        return GlooSender(host, timeout_s)
    raise ValueError(f"weights.backend: {backend!r} is neither nccl nor gloo")
