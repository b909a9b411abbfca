"""The gloo group and its sender, with the receivers in processes of their own."""

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import xxhash

from quartet.weight_transfer.groups.group import Group, turned
from quartet.weight_transfer.groups.wires import gloo_wire
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.meeting import find_store, open_store
from quartet.weight_transfer.memory.buckets import Buckets, checksum, digest
from quartet.weight_transfer.sender import GroupSender, make_sender
from tests.forked import FORKED
from tests.users import NEEDS, possible, users

pytestmark = pytest.mark.processes

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
TENSORS = {
    "embed": torch.arange(1000, dtype=torch.float32).view(10, 100),
    "odd": torch.tensor([3], dtype=torch.uint8),
    "head": torch.linspace(-1, 1, 7, dtype=torch.float64),
    "half": torch.linspace(0, 1, 33).to(torch.bfloat16),
}
MANIFEST = Manifest.of(TENSORS, bucket_bytes=1024)  # 4000 bytes alone, then 1 + 56 + 66


def member(number: int, commands: Connection) -> None:
    """A receiver: joins when told the rank, world size and membership, receives when told the manifest."""
    torch.set_num_threads(1)
    store = find_store(HOST, number, TIMEOUT_S)
    group: Group | None = None
    commands.send("ready")
    while (command := commands.recv()) is not None:
        try:
            if isinstance(command, tuple):
                rank, world_size, membership = command
                group = Group(
                    store,
                    gloo_wire(HOST),
                    rank=rank,
                    world_size=world_size,
                    membership=membership,
                    timeout_s=TIMEOUT_S,
                )
                commands.send("joined")
            else:
                assert group is not None
                commands.send(receive(group, Manifest.unpack(command)))
        except RuntimeError as error:
            commands.send(f"RuntimeError: {error}")


def receive(group: Group, manifest: Manifest) -> tuple[str, list[Any]]:
    digests, values = {}, []
    for number, bucket in enumerate(manifest.buckets()):
        data = torch.empty(sum(manifest.size(index) for index in bucket), dtype=torch.uint8)
        group.broadcast(data)
        digests[number] = digest(data)
        values += [tensor.tolist() for _, tensor in manifest.cut(bucket, data)]
    return checksum(digests), values


class Cast:
    """One sender here and two members elsewhere."""

    def __init__(self) -> None:
        self.sender = make_sender("gloo", MANIFEST, host=HOST, stall_s=TIMEOUT_S)
        self.pushes = 0
        self.pipes, self.processes = [], []
        for _ in range(2):
            mine, theirs = FORKED.Pipe()
            process = FORKED.Process(target=member, args=(self.sender.rendezvous(), theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        assert [self.answer(index) for index in range(2)] == ["ready", "ready"]

    def answer(self, index: int) -> Any:
        assert self.pipes[index].poll(60)
        return self.pipes[index].recv()

    def join(self, membership: int, *members: int) -> None:
        world_size = 1 + len(members)
        for rank, index in enumerate(members, 1):
            self.pipes[index].send((rank, world_size, membership))
        self.sender.join(membership, world_size)
        assert [self.answer(index) for index in members] == ["joined"] * len(members)

    def send(self, tensors: dict[str, torch.Tensor], *members: int) -> tuple[str, list[Any]]:
        """The sender's checksum, and what each member received."""
        for index in members:
            self.pipes[index].send(MANIFEST.pack())
        self.pushes += 1
        self.sender.load(tensors.items(), self.pushes)
        return checksum(self.sender.send(self.pushes)), [self.answer(index) for index in members]

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
    sent, received = cast.send(tensors, *members)
    raw = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    buckets = [raw[0], b"".join(raw[1:])]
    hashed = [xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(data)) for data in buckets]  # each of one chunk
    assert sent == xxhash.xxh3_128_hexdigest(b"".join(hashed))
    assert received == [(sent, [tensor.tolist() for tensor in tensors.values()])] * len(members)


def test_every_member_receives_every_bucket_and_the_same_checksum(cast: Cast) -> None:
    cast.join(1, 0, 1)
    assert len(list(MANIFEST.buckets())) == 2
    check_everyone_received(cast, TENSORS, 0, 1)
    # The group serves push after push.
    check_everyone_received(cast, {name: tensor + 1 for name, tensor in TENSORS.items()}, 0, 1)


def test_a_member_that_never_comes_is_an_error_in_time_and_the_next_membership_works(cast: Cast) -> None:
    cast.pipes[0].send((1, 3, 10))
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        cast.sender.join(10, 3)
    assert cast.answer(0).startswith("RuntimeError: ")
    assert time.monotonic() - start < TIMEOUT_S + 20
    cast.join(11, 0, 1)
    check_everyone_received(cast, TENSORS, 0, 1)


def test_a_member_that_does_not_receive_is_an_error_in_time_and_a_smaller_membership_works(cast: Cast) -> None:
    large = {"embed": torch.zeros(8 << 20)}  # 32 MiB, more than the sockets hold
    manifest = Manifest.of(large, bucket_bytes=1)
    sender = GroupSender(manifest, gloo_wire(HOST), host=HOST, stall_s=TIMEOUT_S)
    sender._store, sender._group = cast.sender._store, None  # type: ignore[attr-defined]
    sender.load(large.items(), 1)
    for rank in (1, 2):
        cast.pipes[rank - 1].send((rank, 3, 20))
    sender.join(20, 3)
    assert [cast.answer(index) for index in (0, 1)] == ["joined"] * 2
    cast.pipes[0].send(manifest.pack())
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        sender.send(1)
    assert time.monotonic() - start < TIMEOUT_S + 20
    cast.answer(0)
    cast.join(21, 1)
    check_everyone_received(cast, TENSORS, 1)


def listening() -> dict[int, str]:
    """Port -> address of all that this process listens on."""
    found = psutil.Process(os.getpid()).net_connections()
    return {each.laddr.port: each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_nowhere_on_loopback_and_else_on_its_host_only(cast: Cast) -> None:
    assert cast.sender.rendezvous() == cast.sender.rendezvous()
    assert cast.sender.rendezvous() not in listening()
    store, port = open_store("0.0.0.0", TIMEOUT_S)
    assert listening()[port] == "0.0.0.0"
    find_store("0.0.0.0", port, TIMEOUT_S).set("key", b"value")
    assert store.get("key") == b"value"


STRANGER = """
import glob, os, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore

ports = [int(each) for each in sys.argv[1:]]
forged = opened = 0
for link in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/map_files/*"):
    try:
        if "quartet-" in os.readlink(link):
            os.open(link, os.O_RDWR)
            opened += 1
    except OSError:
        pass

def forge(port):
    global forged
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        for membership in range(1, 100):
            store.set(f"membership{membership}/abandoned", b"")
        for key in store.list_keys():
            store.delete_key(key)
            store.set(key, b"")
        forged += 1
    except Exception:
        pass

forgers = [threading.Thread(target=forge, args=(port,), daemon=True) for port in ports]
for forger in forgers:
    forger.start()
end = time.monotonic() + 5
for forger in forgers:
    forger.join(max(0.0, end - time.monotonic()))
print(opened, forged)
"""


@pytest.mark.skipif(not possible(), reason=NEEDS)
def test_another_user_of_the_machine_cannot_disturb_the_members_meeting(cast: Cast) -> None:
    """With a TCPStore it could list all keys, and give every membership up that there will be."""
    cast.join(91, 0, 1)
    ports = [str(port) for port in listening()]
    with users(65530) as (stranger,):
        told = stranger.program(STRANGER, *ports)
    assert told.split() == ["0", "0"]
    check_everyone_received(cast, TENSORS, 0, 1)
    cast.join(92, 0, 1)
    check_everyone_received(cast, TENSORS, 0, 1)


def test_a_store_of_a_learner_elsewhere_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"not on this machine or is another user's; set orchestrator\.weights\.host"
    ):
        find_store(HOST, 1, TIMEOUT_S)


def test_newcomers_get_what_was_loaded_last_while_the_group_of_the_others_stays(cast: Cast) -> None:
    cast.join(30, 0)
    check_everyone_received(cast, TENSORS, 0)
    cast.pipes[1].send((1, 2, 31))
    cast.pipes[1].send(MANIFEST.pack())
    cast.sender.add_newcomers(31, 2)
    assert cast.answer(1) == "joined"
    assert cast.answer(1)[1] == [tensor.tolist() for tensor in TENSORS.values()]
    check_everyone_received(cast, {name: tensor + 2 for name, tensor in TENSORS.items()}, 0)


def test_nothing_is_sent_before_a_group_is_formed() -> None:
    sender = GroupSender(MANIFEST, gloo_wire(HOST), host=HOST, stall_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="no transfer group: join comes before send"):
        sender.send(1)
    sender.close()


def test_other_weights_than_the_manifests_are_refused() -> None:
    sender = GroupSender(MANIFEST, gloo_wire(HOST), host=HOST, stall_s=TIMEOUT_S)
    embed = r"the manifest has embed float32\[10, 100\]$"
    with pytest.raises(ValueError, match=r"^weights: odd uint8\[1\] came where " + embed):
        sender.load(list(TENSORS.items())[1:], 1)
    with pytest.raises(ValueError, match=r"^weights: embed float32\[3\] came where " + embed):
        sender.load((TENSORS | {"embed": torch.zeros(3)}).items(), 1)
    with pytest.raises(ValueError, match=r"^weights: they end where the manifest has half bfloat16\[33\]$"):
        sender.load(list(TENSORS.items())[:3], 1)
    sender.close()


def test_backends_have_names_and_nccl_wants_a_gpu() -> None:
    for backend, reason in (
        ("rdma", "'rdma' is not one of gloo, nccl, ipc and cuda-ipc"),
        ("nccl", "nccl, but this process has"),
    ):
        with pytest.raises(ValueError, match=f"^weights.backend: {reason}"):
            make_sender(backend, MANIFEST, host=HOST, stall_s=1)


def test_senders_share_the_buckets_and_their_digests_make_one_checksum() -> None:
    manifest = Manifest.of(TENSORS, bucket_bytes=1)  # each tensor a bucket of its own
    whole, shares = Buckets(manifest), [Buckets(manifest, sender, 2) for sender in (0, 1)]
    assert [number for number, _ in whole.fill(TENSORS.items())] == [0, 1, 2, 3]
    assert [[n for n, _ in share.fill(TENSORS.items())] for share in shares] == [[0, 2], [1, 3]]
    digests = {number: digest(share[number]) for share in shares for number in share.numbers}
    assert checksum(digests) == checksum({number: digest(whole[number]) for number in whole.numbers})
    assert checksum({}) == ""


def test_senders_trees_pass_on_through_different_workers() -> None:
    ranks = [[turned(rank, world_size=5, sender=k, senders=2) for rank in range(1, 5)] for k in range(2)]
    assert ranks == [[1, 2, 3, 4], [3, 4, 1, 2]]
    # However many there are, every group has each rank once.
    for workers in (1, 2, 3, 7):
        for senders in (1, 2, 5):
            for sender in range(senders):
                place = {"world_size": 1 + workers, "sender": sender, "senders": senders}
                assert sorted(turned(rank, **place) for rank in range(1, 1 + workers)) == list(range(1, 1 + workers))
