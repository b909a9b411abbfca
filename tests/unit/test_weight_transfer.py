"""The gloo group and its sender, with the receivers in processes of their own."""

import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from services.common.weight_transfer.gloo import GlooGroup, reach_store
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.sender import GlooSender, make_sender

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
TENSORS = {
    "embed": torch.arange(1000, dtype=torch.float32).view(10, 100),
    "odd": torch.tensor([3], dtype=torch.uint8),
    "head": torch.linspace(-1, 1, 7, dtype=torch.float64),
    "half": torch.linspace(0, 1, 33).to(torch.bfloat16),
}
MANIFEST = Manifest.of(TENSORS, bucket_bytes=1024)  # 4000 bytes alone, then 1 + 56 + 66


def member(port: int, commands: Connection) -> None:
    """A receiver: joins when told the rank, world size and epoch, receives when told the manifest."""
    torch.set_num_threads(1)
    store = reach_store(HOST, port, TIMEOUT_S)
    group: GlooGroup | None = None
    commands.send("ready")
    while (command := commands.recv()) is not None:
        try:
            if isinstance(command, tuple):
                rank, world_size, epoch = command
                group = GlooGroup(
                    store, host=HOST, rank=rank, world_size=world_size, epoch=epoch, timeout_s=TIMEOUT_S
                )
                commands.send("joined")
            else:
                assert group is not None
                commands.send(receive(group, Manifest.unpack(command)))
        except RuntimeError as error:
            commands.send(f"RuntimeError: {error}")


def receive(group: GlooGroup, manifest: Manifest) -> tuple[str, list[Any]]:
    digest, values = hashlib.sha256(), []
    for bucket in manifest.buckets():
        data = torch.empty(sum(manifest.size(index) for index in bucket), dtype=torch.uint8)
        group.broadcast(data)
        digest.update(data.numpy())
        values += [tensor.tolist() for _, tensor in manifest.cut(bucket, data)]
    return digest.hexdigest(), values


class Cast:
    """One sender here and two members elsewhere."""

    def __init__(self) -> None:
        self.sender = make_sender("gloo", host=HOST, bucket_bytes=1024, timeout_s=TIMEOUT_S)
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(2):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=member, args=(self.sender.rendezvous(), theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        assert [self.answer(index) for index in range(2)] == ["ready", "ready"]

    def answer(self, index: int) -> Any:
        assert self.pipes[index].poll(60)
        return self.pipes[index].recv()

    def join(self, epoch: int, *members: int) -> None:
        world_size = 1 + len(members)
        for rank, index in enumerate(members, 1):
            self.pipes[index].send((rank, world_size, epoch))
        self.sender.join(epoch, world_size)
        assert [self.answer(index) for index in members] == ["joined"] * len(members)

    def send(self, tensors: dict[str, torch.Tensor], *members: int) -> tuple[str, list[Any]]:
        """The sender's checksum, and what each member received."""
        for index in members:
            self.pipes[index].send(MANIFEST.pack())
        checksum = self.sender.send(tensors, MANIFEST)
        return checksum, [self.answer(index) for index in members]

    def end(self) -> None:
        self.sender.close()
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)
            assert process.exitcode == 0


@pytest.fixture(scope="module")
def cast() -> Iterator[Cast]:
    cast = Cast()
    yield cast
    cast.end()


def check_everyone_received(cast: Cast, tensors: dict[str, torch.Tensor], *members: int) -> None:
    checksum, received = cast.send(tensors, *members)
    expected = hashlib.sha256(b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values()))
    assert checksum == expected.hexdigest()
    assert received == [(checksum, [tensor.tolist() for tensor in tensors.values()])] * len(members)


def test_every_member_receives_every_bucket_and_the_same_checksum(cast: Cast) -> None:
    cast.join(1, 0, 1)
    assert len(list(MANIFEST.buckets())) == 2
    check_everyone_received(cast, TENSORS, 0, 1)
    # The group serves push after push.
    check_everyone_received(cast, {name: tensor + 1 for name, tensor in TENSORS.items()}, 0, 1)


def test_a_member_that_never_comes_is_an_error_in_time_and_the_next_epoch_works(cast: Cast) -> None:
    cast.pipes[0].send((1, 3, 10))
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        cast.sender.join(10, 3)
    assert cast.answer(0).startswith("RuntimeError: ")
    assert time.monotonic() - start < TIMEOUT_S + 3
    cast.join(11, 0, 1)
    check_everyone_received(cast, TENSORS, 0, 1)


def test_a_member_that_does_not_receive_is_an_error_in_time_and_a_smaller_epoch_works(cast: Cast) -> None:
    large = {"embed": torch.zeros(8 << 20)}  # 32 MiB, more than the sockets hold
    manifest = Manifest.of(large, bucket_bytes=1)
    cast.join(20, 0, 1)
    cast.pipes[0].send(manifest.pack())
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        cast.sender.send(large, manifest)
    assert time.monotonic() - start < TIMEOUT_S + 3
    cast.answer(0)
    cast.join(21, 1)
    check_everyone_received(cast, TENSORS, 1)


def test_the_store_listens_on_its_host_only(cast: Cast) -> None:
    port = cast.sender.rendezvous()
    assert cast.sender.rendezvous() == port
    listening = [
        connection.laddr
        for connection in psutil.Process(os.getpid()).net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == [(HOST, port)]


def test_nothing_is_sent_before_a_group_is_formed() -> None:
    sender = GlooSender(HOST, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="no transfer group: join comes before send"):
        sender.send(TENSORS, MANIFEST)
    sender.close()


def test_backends_have_names() -> None:
    with pytest.raises(ValueError, match=r"weights.backend: 'ipc' is neither nccl nor gloo"):
        make_sender("ipc", host=HOST, bucket_bytes=1, timeout_s=1)
