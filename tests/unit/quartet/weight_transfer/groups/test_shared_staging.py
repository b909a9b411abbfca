"""Two workers of a replica stage what they receive once, in memory that they share."""

import gc
import glob
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet

import pytest
import torch

from quartet.weight_transfer import receiver as receiver_module
from quartet.weight_transfer.groups.group import Wire
from quartet.weight_transfer.groups.wires import gloo_wire
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.memory.buckets import Buckets, checksum
from quartet.weight_transfer.memory.pinning import READ_ONLY
from quartet.weight_transfer.memory.shared_memory import Segment
from quartet.weight_transfer.pieces import Piece, StagedPieces
from quartet.weight_transfer.receiver import GroupReceiver, Joining
from quartet.weight_transfer.sender import GroupSender
from tests.fake_device import DEVICE, DOWN, UP, FakeDevice
from tests.forked import FORKED

HOST, STALL_S = "127.0.0.1", 60.0
CPU = torch.device("cpu")
CARRIED = Wire(gloo_wire(HOST).form, DEVICE)
"""A wire like NCCL's, which reads and writes a device's memory."""
GLOO = gloo_wire(HOST)


class Replica:
    """Senders, and the workers of a replica."""

    def __init__(
        self,
        workers: int = 2,
        *,
        senders: int = 1,
        wire: Wire = GLOO,
        device: torch.device = CPU,
        on_gpu: bool = False,
    ) -> None:
        self._senders, self._wire, self._device, self._on_gpu = senders, wire, device, on_gpu
        self.workers = [GroupReceiver(device, lambda backend, host, device, stall_s: wire) for _ in range(workers)]
        self.membership = 0
        self.take(1.0)

    def take(self, value: float, count: int = 4, bucket_bytes: int = 16) -> None:
        """Makes the learner's weights; those in another number or other buckets need other senders."""
        self.weights = {f"w{i}": torch.full((4,), value + i, device=self._device) for i in range(count)}
        self.manifest = Manifest.of(self.weights, bucket_bytes)

    def join(self) -> None:
        options: dict[str, Any] = {"host": HOST, "stall_s": STALL_S, "on_gpu": self._on_gpu}
        if self._device != CPU:
            options["device"] = self._device
        self.senders = [
            GroupSender(self.manifest, self._wire, sender=sender, senders=self._senders, **options)
            for sender in range(self._senders)
        ]
        self.membership += 1
        senders = [[HOST, sender.rendezvous()] for sender in self.senders]
        world, count = len(self.workers) + 1, len(self.workers)

        def joins(worker: int) -> None:
            joining = Joining("nccl", senders, 1 + worker, world, self.membership, STALL_S, on_gpu=self._on_gpu)
            joining.worker, joining.workers = worker, count
            self.workers[worker].join(joining)

        self.all(
            [
                *(lambda w=worker: joins(w) for worker in range(count)),
                *(lambda sender=sender: sender.join(self.membership, world) for sender in self.senders),
            ]
        )

    def push(self, number: int, *, pieces: bool = False) -> list[str]:
        """The checksums of the workers; that of the senders is the same. With `pieces` each keeps its own alone."""
        received: dict[int, str] = {}
        owns = [self.pieces(worker) if pieces else None for worker in range(len(self.workers))]

        def receives(worker: int) -> None:
            received[worker] = self.workers[worker].receive(self.manifest, owns[worker])

        for worker, own in zip(self.workers, owns, strict=True):
            worker.make_room(self.manifest, own)
        for sender in self.senders:
            sender.load(self.weights.items(), number)
        sent: dict[int, bytes] = {}
        self.all(
            [
                *(lambda w=worker: receives(w) for worker in range(len(self.workers))),
                *(lambda sender=sender: sent.update(sender.send(number)) for sender in self.senders),
            ]
        )
        assert set(received.values()) == {checksum(sent)}
        return [received[worker] for worker in range(len(self.workers))]

    def loaded(self, worker: int) -> dict[str, list[float]]:
        """The weights as a worker loads them."""
        receiver = self.workers[worker]
        loaded = {
            name: tensor.tolist()
            for bucket, data in receiver.buckets()
            for name, tensor in self.manifest.cut(bucket, data.to(self._device))
        }
        receiver.check()
        return loaded

    def pieces(self, worker: int) -> dict[str, list[Piece]]:
        """A worker's pieces: its share of the numbers of each weight."""
        each = 4 // len(self.workers)
        return {name: [Piece(worker * each, (each,), (1,))] for name in self.weights}

    def taken(self, worker: int) -> dict[str, list[float]]:
        """The numbers of its pieces as a worker copies them into place."""
        weights = self.workers[worker].weights(self.pieces(worker))
        taken = {name: piece.to(self._device).tolist() for name, [piece] in weights}
        self.workers[worker].check()
        return taken

    def shares(self) -> list[dict[str, list[float]]]:
        """The numbers that `taken` should give of each worker."""
        each = 4 // len(self.workers)
        return [
            {name: numbers[worker * each : (worker + 1) * each] for name, numbers in self.expected.items()}
            for worker in range(len(self.workers))
        ]

    @property
    def expected(self) -> dict[str, list[float]]:
        return {name: weight.tolist() for name, weight in self.weights.items()}

    @staticmethod
    def all(work: list[Callable[[], Any]]) -> None:
        threads = [threading.Thread(target=each) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for sender in self.senders:
            sender.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the segments that are made."""
    numbers: list[int] = []
    create = Segment.create

    def counted(size: int) -> Segment:
        segment = create(size)
        numbers.append(segment.number)
        return segment

    monkeypatch.setattr(Segment, "create", counted)
    return numbers


def second_worker(packed: bytes, joining: Joining, pipe: Connection) -> None:
    """A worker in a process of its own: sends its checksum and what it loads, after each word that it gets."""
    manifest, receiver = Manifest.unpack(packed), GroupReceiver(CPU)
    receiver.join(joining)
    while pipe.recv():
        pipe.send(receiver.receive(manifest))
        pipe.recv()
        loaded = [data.tolist() for _, data in receiver.buckets()]
        receiver.check()  # before the answer, after which the first worker receives again
        pipe.send(loaded)
    receiver.close()


def test_workers_in_different_processes_share_what_they_stage(made: list[int]) -> None:
    weights = {f"w{i}": torch.full((4,), 1.0 + i) for i in range(4)}
    manifest = Manifest.of(weights, 16)
    sender, first = GroupSender(manifest, GLOO, host=HOST, stall_s=STALL_S), GroupReceiver(CPU)
    senders: list[list[Any]] = [[HOST, sender.rendezvous()]]
    joinings = [Joining("gloo", senders, 1 + worker, 3, 1, STALL_S, worker=worker, workers=2) for worker in (0, 1)]
    mine, theirs = FORKED.Pipe()
    process = FORKED.Process(target=second_worker, args=(manifest.pack(), joinings[1], theirs), daemon=True)
    process.start()
    theirs.close()  # so that a worker that fails ends the wait for its answer
    Replica.all([lambda: first.join(joinings[0]), lambda: sender.join(1, 3)])
    for number in (1, 2):
        for tensor in weights.values():
            tensor += 10
        mine.send(True)
        sender.load(weights.items(), number)
        received: list[str] = []
        Replica.all(
            [
                lambda received=received: received.append(first.receive(manifest)),  # type: ignore[misc]
                lambda number=number: sender.send(number),  # type: ignore[misc]
            ]
        )
        assert mine.recv() == received[0]
        mine.send(True)
        assert mine.recv() == [data.tolist() for _, data in first.buckets()]
    assert len(made) == 1
    mine.send(False)
    process.join(20)
    first.close()
    sender.close()


@pytest.mark.parametrize("workers", [2, 4])
def test_a_replica_stages_once_whatever_its_workers(made: list[int], workers: int) -> None:
    replica = Replica(workers)
    replica.join()
    replica.push(1)
    assert [replica.loaded(worker) for worker in range(workers)] == [replica.expected] * workers
    # Kept from push to push, and from membership to membership.
    for number in (2, 3):
        replica.take(10.0 * number)
        replica.push(number)
        assert [replica.loaded(worker) for worker in range(workers)] == [replica.expected] * workers
    replica.take(-1.0)
    replica.join()
    replica.push(4)
    assert [replica.loaded(worker) for worker in range(workers)] == [replica.expected] * workers
    assert len(made) == 1
    # Other shapes need other memory, for all of them.
    replica.take(5.0, count=6)
    replica.join()
    replica.push(5)
    assert [replica.loaded(worker) for worker in range(workers)] == [replica.expected] * workers
    assert len(made) == 2
    replica.close()


def test_one_worker_shares_nothing(made: list[int]) -> None:
    alone = Replica(1)
    alone.join()
    alone.push(1)
    assert alone.loaded(0) == alone.expected
    alone.close()
    assert made == []


@pytest.mark.parametrize(("workers", "senders"), [(2, 1), (4, 1), (2, 2), (2, 5)])
def test_each_worker_keeps_its_pieces_once_they_are_known(made: list[int], workers: int, senders: int) -> None:
    before, replica = open_here(), Replica(workers, senders=senders)
    replica.join()
    replica.push(1)
    assert [replica.taken(worker) for worker in range(workers)] == replica.shares()
    assert len(open_here() - before) == 1
    for number in (2, 3):
        replica.take(10.0 * number)
        replica.push(number, pieces=True)
        assert [replica.taken(worker) for worker in range(workers)] == replica.shares()
        assert open_here() == before
    # From membership to membership.
    areas = [worker._staged for worker in replica.workers]
    replica.take(-1.0)
    replica.join()
    replica.push(4, pieces=True)
    assert [replica.taken(worker) for worker in range(workers)] == replica.shares()
    assert all(worker._staged is area for worker, area in zip(replica.workers, areas, strict=True))
    assert len(made) == 1
    # Others are whole at first, and those after them are not the ones before.
    replica.take(5.0, count=6)
    replica.join()
    replica.push(5)
    assert [replica.loaded(worker) for worker in range(workers)] == [replica.expected] * workers
    assert len(made) == 2
    replica.push(6, pieces=True)
    assert [replica.taken(worker) for worker in range(workers)] == replica.shares()
    assert open_here() == before
    replica.close()


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_bytes_that_workers_copy_between_host_and_device(on_gpu: bool) -> None:
    """Whole weights come by way of the host, also where pieces stay on the GPUs, which may have no room for all."""
    with FakeDevice().counting() as device:
        replica = Replica(wire=CARRIED, device=DEVICE, on_gpu=on_gpu)
        replica.join()
        whole, back = 4 * 16, 0 if on_gpu else 2 * 16
        by_sender = 0 if on_gpu else whole
        for pieces, down, up in ((False, whole, 2 * whole), (True, *((0, 0) if on_gpu else (whole, whole)))):
            device.copied.clear()
            replica.push(2, pieces=pieces)
            took = replica.taken if pieces else replica.loaded
            assert [took(worker) for worker in range(2)] == (replica.shares() if pieces else [replica.expected] * 2)
            assert device.copied == Counter({("", DOWN): by_sender + down, ("", UP): back + up})
        replica.close()


def test_without_room_for_sharing_each_worker_stages_its_own(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def full(size: int) -> Segment:
        raise RuntimeError("/dev/shm has no room")

    monkeypatch.setattr(Segment, "create", full)
    replica = Replica()
    replica.join()
    for number in (1, 2):
        replica.take(float(number))
        replica.push(number)
        assert [replica.loaded(worker) for worker in range(2)] == [replica.expected] * 2
    assert logged == ["each worker stages weights of its own, as they cannot be shared: /dev/shm has no room"]
    areas = [worker._staged[0].data_ptr() for worker in replica.workers]  # type: ignore[index]
    assert len(set(areas)) == 2
    replica.close()


def test_weights_that_the_first_worker_has_not_all_received_are_not_loaded() -> None:
    replica = Replica()
    replica.join()
    replica.push(1)
    first, second = replica.workers
    stage = first._staged_from

    def fails(arrived: torch.Tensor, take: Any) -> bytes:
        raise RuntimeError("a copy failed")

    first._staged_from = fails  # type: ignore[method-assign]
    failures: list[str] = []

    def receives() -> None:
        try:
            first.receive(replica.manifest)
        except RuntimeError as error:
            failures.append(str(error))

    [sender] = replica.senders
    sender.load(replica.weights.items(), 2)
    replica.all([receives, lambda: second.receive(replica.manifest), lambda: sender.send(2)])
    assert failures == ["a copy failed"]
    with pytest.raises(RuntimeError, match="the first worker of this replica has not received all weights"):
        replica.loaded(1)
    first._staged_from = stage  # type: ignore[method-assign]
    replica.join()
    replica.push(3)
    assert [replica.loaded(worker) for worker in range(2)] == [replica.expected] * 2
    replica.close()


def test_weights_that_change_while_they_are_loaded_are_noticed() -> None:
    replica = Replica()
    replica.join()
    replica.push(1)
    _, second = replica.workers
    list(second.buckets())
    replica.take(7.0)
    replica.push(2)
    with pytest.raises(RuntimeError, match="the first worker of this replica received other weights while"):
        second.check()
    assert replica.loaded(1) == replica.expected
    replica.close()


def test_a_worker_that_cannot_open_the_memory_stages_its_own(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def closed(number: int, size: int) -> Segment:
        raise RuntimeError("no shared memory here")

    monkeypatch.setattr(Segment, "attach", closed)
    replica = Replica()
    replica.join()
    replica.push(1)
    area = replica.workers[1]._staged
    replica.take(3.0)
    replica.push(2)
    assert [replica.loaded(worker) for worker in range(2)] == [replica.expected] * 2
    assert replica.workers[1]._staged is area
    assert len(logged) == 1
    assert logged[0].startswith("this worker stages weights of its own, as it cannot open those of the first one")
    replica.close()


def open_here() -> set[str]:
    """The shared memory that this process has open or maps."""
    gc.collect()
    links = [os.readlink(each) for each in glob.glob("/proc/self/fd/*") if os.path.islink(each)]
    return {each for each in links if each.startswith("/dev/shm/quartet-")}


def test_memory_that_is_replaced_is_freed() -> None:
    before, replica = open_here(), Replica()
    for count in (4, 6, 5):
        replica.take(1.0, count)
        replica.join()
        replica.push(count)
        replica.loaded(1)
        assert len(open_here() - before) == 1
    replica.close()


def test_memory_for_a_push_is_taken_when_all_workers_have_freed_that_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both may not fit. A second learner may send the same weights in other buckets, or others."""
    before, replica, areas = open_here(), Replica(), WeakSet[StagedPieces]()
    others: list[tuple[int, int]] = []
    """Segments and areas for pieces that are there of other pushes, each time that memory is taken."""

    def note() -> None:
        others.append((len(open_here() - before), sum(area.manifest != replica.manifest for area in areas)))

    class Noted(StagedPieces):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            note()
            super().__init__(*arguments, **options)
            areas.add(self)

    create = Segment.create

    def noted(size: int) -> Segment:
        note()
        return create(size)

    monkeypatch.setattr(receiver_module, "StagedPieces", Noted)
    monkeypatch.setattr(Segment, "create", noted)
    pushes = [(4, 16, False), (4, 16, True), (4, 32, True), (6, 16, False), (5, 16, False)]
    for number, (count, bucket_bytes, pieces) in enumerate(pushes):
        replica.take(float(number), count, bucket_bytes)
        replica.join()
        replica.push(number, pieces=pieces)
        took, expected = (replica.taken, replica.shares()) if pieces else (replica.loaded, [replica.expected] * 2)
        assert [took(worker) for worker in range(2)] == expected
    assert others == [(0, 0)] * 7  # three times for both together, and twice for each
    replica.close()


def test_on_a_gpu_the_others_pin_what_they_may_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, int]] = []
    monkeypatch.setattr(
        receiver_module, "pin", lambda memory, owner, *, flags: pinned.append((memory.data_ptr(), flags))
    )
    manifest = Manifest.of({"w": torch.zeros(4)}, 16)
    receiver = GroupReceiver(torch.device("cuda", 1))
    receiver._worker, receiver._segment = 1, Segment.create(Buckets.size(manifest))
    area = receiver._area(manifest)
    assert pinned == [(area[0].data_ptr(), READ_ONLY)]


def test_a_worker_does_not_wait_for_the_memory_of_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica would take part in no attempt of the push until that one had waited as long as for a bucket."""
    replica = Replica()
    replica.join()

    def failing(size: int) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(receiver_module, "_shared", failing)
    first, second = replica.workers
    [sender] = replica.senders
    errors: list[Exception] = []

    def receives() -> None:
        try:
            second.receive(replica.manifest)
        except RuntimeError as error:
            errors.append(error)

    began, waiting = time.monotonic(), threading.Thread(target=receives)
    waiting.start()
    with pytest.raises(MemoryError):
        first.receive(replica.manifest)
    first.close()
    sender.abandon(replica.membership)
    waiting.join(STALL_S)
    assert len(errors) == 1
    assert time.monotonic() - began < STALL_S / 2
    replica.close()
