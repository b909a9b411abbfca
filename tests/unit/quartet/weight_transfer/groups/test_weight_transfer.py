"""Senders: where their members find them, what they refuse, and how several share the weights."""

import os

import psutil
import pytest
import torch
import xxhash

from quartet.weight_transfer.groups.group import turned
from quartet.weight_transfer.groups.wires import gloo_wire
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.meeting import find_store, open_store
from quartet.weight_transfer.memory.buckets import Buckets, checksum, digest
from quartet.weight_transfer.sender import GroupSender, make_sender
from tests.unit.quartet.weight_transfer.groups.test_shared_staging import Replica
from tests.unit.quartet.weight_transfer.memory.test_shared_memory import MANIFEST, TENSORS
from tests.users import NEEDS, possible, users

HOST = "127.0.0.1"
TIMEOUT_S = 3.0


def listening() -> dict[int, str]:
    """Port -> address of all that this process listens on."""
    found = psutil.Process(os.getpid()).net_connections()
    return {each.laddr.port: each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def test_the_store_listens_nowhere_on_loopback_and_else_on_its_host_only() -> None:
    sender = make_sender("gloo", MANIFEST, host=HOST, stall_s=TIMEOUT_S)
    assert sender.rendezvous() == sender.rendezvous()
    assert sender.rendezvous() not in listening()
    sender.close()
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


@pytest.mark.processes
@pytest.mark.skipif(not possible(), reason=NEEDS)
def test_another_user_of_the_machine_cannot_disturb_the_members_meeting() -> None:
    """With a TCPStore it could list all keys, and give every membership up that there will be."""
    replica = Replica()
    replica.join()
    ports = [str(port) for port in listening()]
    with users(65530) as (stranger,):
        told = stranger.program(STRANGER, *ports)
    assert told.split() == ["0", "0"]
    replica.push(1)
    replica.join()
    replica.push(2)
    replica.close()


def test_a_store_of_a_learner_elsewhere_is_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"not on this machine or is another user's; set orchestrator\.weights\.host"
    ):
        find_store(HOST, 1, TIMEOUT_S)


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
    assert checksum(digests) == xxhash.xxh3_128_hexdigest(b"".join(digest(whole[number]) for number in whole.numbers))
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
