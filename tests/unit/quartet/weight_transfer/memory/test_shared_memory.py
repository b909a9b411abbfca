"""Memory shared between processes, and a push through it."""

import gc
import glob
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.weight_transfer.ipc import SharedBuckets, SharedSender
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory import shared_memory as segments
from quartet.weight_transfer.memory.buckets import Buckets
from quartet.weight_transfer.memory.filling import Filling
from quartet.weight_transfer.memory.shared_memory import Segment
from tests.forked import FORKED
from tests.unit.fake_cuda import FakeGpu

pytestmark = pytest.mark.processes

TENSORS = {
    "embed": torch.arange(1000, dtype=torch.float32).view(10, 100),
    "odd": torch.tensor([3], dtype=torch.uint8),
    "head": torch.linspace(-1, 1, 7, dtype=torch.float64),
    "half": torch.linspace(0, 1, 33).to(torch.bfloat16),
}
MANIFEST = Manifest.of(TENSORS, bucket_bytes=1024)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No segment of this process outlives a test."""
    before = own_files()
    yield
    assert own_files() <= before


def own_files() -> set[str]:
    return {link for entry in os.scandir("/proc/self/fd") if "/dev/shm/quartet-" in (link := link_of(entry.path))}


def link_of(path: str) -> str:
    return os.readlink(path) if os.path.lexists(path) else ""


def test_a_push_that_could_not_be_gathered_is_not_read() -> None:
    sender = SharedSender.host(MANIFEST)
    with pytest.raises(ValueError, match="they end where"):
        sender.load(list(TENSORS.items())[:2], 1)
    with pytest.raises(RuntimeError, match="is writing"):
        SharedBuckets.host([sender.rendezvous()], MANIFEST).verify()
    sender.load(TENSORS.items(), 2)
    SharedBuckets.host([sender.rendezvous()], MANIFEST).verify()
    sender.close()


def scribble(number: int) -> None:
    """A reader that writes."""
    Segment.attach(number, 100).data[:] = 7


def test_a_reader_maps_the_writers_own_memory_and_cannot_write_to_it() -> None:
    segment = Segment.create(100)
    seen = Segment.attach(segment.number, 100)
    segment.data[:] = 5
    assert seen.data.sum() == 500
    process = FORKED.Process(target=scribble, args=(segment.number,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV
    assert segment.data.sum() == 500
    segment.close()


def test_a_reader_pins_for_its_gpu_all_that_it_reads_until_it_detaches(tmp_path: Path) -> None:
    senders = [SharedSender.host(MANIFEST, sender=number, senders=2) for number in (0, 1)]
    numbers, gpu = [sender.rendezvous() for sender in senders], FakeGpu(tmp_path)
    SharedBuckets.host(numbers, MANIFEST, torch.device("cpu"), gpu.library)
    assert gpu.pinned == {}
    shared = SharedBuckets.host(numbers, MANIFEST, torch.device("cuda"), gpu.library)
    sizes = [Buckets.size(MANIFEST, number, 2) for number in (0, 1)]
    read_only = 8  # cudaHostRegisterReadOnly
    assert list(gpu.pinned.values()) == [(size, read_only) for size in sizes]
    del shared
    gc.collect()
    assert gpu.pinned == {}
    for sender in senders:
        sender.close()


def test_memory_that_is_elsewhere_or_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^no such shared memory here"):
        Segment.attach(1, 100)
    segment = Segment.create(100)
    with pytest.raises(RuntimeError, match="100 bytes are shared where 101"):
        Segment.attach(segment.number, 101)
    with pytest.raises(RuntimeError, match="ipc needs the learner and the replicas on one machine"):
        SharedBuckets.host([1], MANIFEST)
    segment.close()


def test_more_than_there_is_room_for_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The backend matters only if this is how the learner's weights travel."""
    with pytest.raises(RuntimeError, match=r"no room for \d+ MiB of weights .*; enlarge it$"):
        Segment.create(1 << 50)
    monkeypatch.setattr(segments, "FOLDER", tmp_path / "none")
    with pytest.raises(RuntimeError, match=r"none has no room for 0 MiB of weights .*; enlarge it$"):
        Segment.create(100)
    with pytest.raises(RuntimeError, match=r"; enlarge it, or set orchestrator.weights.backend to gloo$"):
        SharedSender.host(MANIFEST)


def hold(size: int, numbers: Connection, die: Connection) -> None:
    """Makes a segment and, when told to, dies without a word."""
    segment = Segment.create(size)
    numbers.send(segment.number)
    die.recv()
    os._exit(9)


def test_memory_goes_with_a_learner_that_is_killed() -> None:
    mine, theirs = FORKED.Pipe()
    tell, told = FORKED.Pipe()
    process = FORKED.Process(target=hold, args=(10, theirs, told), daemon=True)
    process.start()
    number = mine.recv()
    Segment.attach(number, 10)
    tell.send("die")
    process.join(10)
    with pytest.raises(RuntimeError, match="no process has it"):
        Segment.attach(number, 10)


def test_only_this_users_processes_can_attach_and_no_name_is_left_behind() -> None:
    segment = Segment.create(10)
    path = segments.FOLDER / f"quartet-{segment.number}"
    assert not path.exists()
    file = next(each for each in glob.iglob("/proc/self/fd/*") if os.readlink(each).startswith(str(path)))
    assert os.stat(file).st_mode & 0o777 == 0o600
    segment.close()


def test_buckets_begin_at_multiples_of_64() -> None:
    size = Buckets.size(MANIFEST)
    assert size == sum(-(-n // 64) * 64 for n in (4000, 1 + 56 + 66))
    memory = torch.zeros(size, dtype=torch.uint8)
    buckets = Buckets(MANIFEST, memory=memory)
    assert [number for number, _ in buckets.fill(TENSORS.items())] == [0, 1]
    assert [buckets[n].data_ptr() - memory.data_ptr() for n in (0, 1)] == [0, 4032]
    actual: dict[str, Any] = {name: tensor.tolist() for name, tensor in buckets.tensors()}
    assert actual == {name: tensor.tolist() for name, tensor in TENSORS.items()}


def test_a_bucket_is_waited_for_until_it_is_full_of_the_right_push() -> None:
    filling = Filling()
    with pytest.raises(RuntimeError, match=r"bucket 0 of push 1 was not gathered within 0.01 s"):
        filling.wait(1, 0, 0.01)
    filling.begin(1)
    filling.full(0)
    filling.wait(1, 0, 0.01)
    filling.end()
    filling.wait(1, 0, 0.01)
    # What ended before it was full never will be.
    with pytest.raises(RuntimeError, match="bucket 1 of push 1"):
        filling.wait(1, 1, 60)
    filling.begin(2)
    with pytest.raises(RuntimeError, match="bucket 0 of push 1"):
        filling.wait(1, 0, 0.01)
