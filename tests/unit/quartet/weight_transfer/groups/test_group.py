"""The group as NCCL runs it, on a CPU: through a wire with a device of its own, with gloo or nothing behind it."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, PrefixStore, Store

from quartet.ranks.nccl_settings import DEFAULTS, GIVE_UP, reserve
from quartet.ranks.rendezvous import reach_store, serve_store
from quartet.seams.torch import FREEING
from quartet.weight_transfer import receiver as receiver_module
from quartet.weight_transfer.groups import group as group_module
from quartet.weight_transfer.groups.group import SENDER, Group, Wire, give_up
from quartet.weight_transfer.groups.wires import SETTINGS, environment, gloo_wire, nccl_wire
from quartet.weight_transfer.manifest import Manifest
from quartet.weight_transfer.meeting import find_store, open_store
from quartet.weight_transfer.memory.buckets import Buckets, checksum
from quartet.weight_transfer.receiver import GroupReceiver, Joining
from quartet.weight_transfer.sender import GroupSender
from tests.fake_device import DEVICE, DOWN, UP, FakeDevice

HOST = "127.0.0.1"
CPU = torch.device("cpu")
CARRIED = Wire(gloo_wire(HOST).form, DEVICE)
"""A wire like NCCL's, which reads and writes a device's memory."""
TIMEOUT_S = 1.0
PLACE: dict[str, Any] = {"world_size": 2, "membership": 1, "timeout_s": TIMEOUT_S}
PATIENT: dict[str, Any] = PLACE | {"timeout_s": 60.0}
"""For members that all come, however busy the machine is."""


class Stuck:
    """A process group whose every operation hangs until it is aborted, as NCCL's does when a member is gone."""

    def __init__(self) -> None:
        self.begun, self.aborted = threading.Event(), threading.Event()
        self.aborts = 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "Stuck":
        self.wait(timedelta(seconds=60))
        return self

    def wait(self, timeout: timedelta) -> None:
        self.begun.set()
        if self.aborted.wait(timeout.total_seconds()):
            raise RuntimeError("NCCL communicator was aborted")
        raise RuntimeError("timed out")

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()


class StuckForever(Stuck):
    """One whose abort hangs too, as NCCL's does while a communicator forms, until torch gives the communicator up."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up = threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        assert self.given_up.wait(60)
        self.aborted.set()


class Answering:
    """One whose operations end at once, until it is told to hang."""

    def __init__(self) -> None:
        self.stuck: Stuck | None = None
        self.aborts = 0

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "Answering":
        return self

    def wait(self, timeout: timedelta) -> None:
        if self.stuck is not None:
            self.stuck.wait(timeout)

    def abort(self) -> None:
        self.aborts += 1
        if self.stuck is not None:
            self.stuck.abort()


def alone(process_group: Any, device: torch.device | None = CPU, timeout_s: float = TIMEOUT_S) -> Group:
    """A group of one member, with this behind it."""
    wire = Wire(lambda *_: process_group, device)
    return Group(open_store(HOST, TIMEOUT_S)[0], wire, rank=SENDER, world_size=1, membership=1, timeout_s=timeout_s)


def test_what_is_sent_arrives() -> None:
    store, number = open_store(HOST, 60)
    groups: dict[int, Group] = {}

    def join() -> None:
        groups[1] = Group(find_store(HOST, number, 60), CARRIED, rank=1, **PATIENT)

    def receive() -> None:
        for data in received:
            groups[1].broadcast(data)

    joining = threading.Thread(target=join)
    joining.start()
    groups[0] = Group(store, CARRIED, rank=SENDER, **PATIENT)
    joining.join()
    sent = [torch.arange(size, dtype=torch.uint8) for size in (7, 200, 50)]
    received = [torch.zeros_like(data) for data in sent]
    receiving = threading.Thread(target=receive)
    receiving.start()
    for data in sent:
        groups[0].broadcast(data)
    receiving.join()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sent, received, strict=True))
    for group in groups.values():
        group.close()


def test_a_worker_that_comes_late_gives_up_with_the_others_and_is_free_for_the_next_attempt() -> None:
    _, number = open_store(HOST, 60)
    receiver = GroupReceiver(CPU)

    def join(left_s: float) -> None:
        receiver.join(Joining("gloo", [[HOST, number]], 1, 2, 1, 60, time.monotonic() + left_s))

    with pytest.raises(RuntimeError, match="membership 1 was given up before this worker came to join it"):
        join(-0.1)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        join(0.5)
    assert 0.4 < time.monotonic() - start < 30


def test_a_worker_that_one_of_several_senders_does_not_meet_leaves_the_groups_of_the_others() -> None:
    process_group = Answering()
    receiver = GroupReceiver(CPU, lambda backend, host, device, stall_s: Wire(lambda *_: process_group))
    (met, first), (_, second) = open_store(HOST, 60), open_store(HOST, 60)
    PrefixStore("membership1", met).set("here0", b"")
    with pytest.raises(RuntimeError, match=r"ranks \[0\] did not come"):
        receiver.join(Joining("gloo", [[HOST, first], [HOST, second]], 1, 2, 1, 60, time.monotonic() + 0.5))
    assert process_group.aborts == 1
    with pytest.raises(RuntimeError, match="no transfer group: prepare comes before transfer"):
        receiver.receive(Manifest.of({}, bucket_bytes=1))


def test_a_member_that_dies_after_the_roll_was_called_does_not_hold_the_others_up() -> None:
    """The caller's thread is free at the deadline, though NCCL's first operation never ends by itself."""
    stuck = Stuck()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^the group did not form: no answer in 1 s$"):
        alone(stuck)
    assert time.monotonic() - start < TIMEOUT_S + 20
    assert stuck.aborted.wait(5)
    assert stuck.aborts == 1


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("dies", ["before the roll", "after it"])
def test_those_who_wait_for_a_dead_member_leave_when_the_sender_gives_up(where: str, dies: str) -> None:
    """Both with a deadline of ten minutes. A TCPStore, which members elsewhere use, answers one wait at a time."""
    here = open_store(HOST, 600)[0] if where == "here" else serve_store(HOST, 600)
    there = here.clone() if isinstance(here, FileStore) else reach_store(HOST, here.port, 600)
    waiting = threading.Barrier(3)

    def form(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        waiting.wait(60)
        store.get("address of the one that died")
        return Answering()

    failures: dict[int, str] = {}

    def join(rank: int, store: Store) -> None:
        with pytest.raises(RuntimeError) as failed:
            Group(store, Wire(form), rank=rank, world_size=3, membership=7, timeout_s=600)
        failures[rank] = str(failed.value)

    joining = [threading.Thread(target=join, args=each) for each in ((SENDER, here), (1, there))]
    for thread in joining:
        thread.start()
    if dies == "after it":
        PrefixStore("membership7", here.clone()).set("here2", b"")
        waiting.wait(60)
    give_up(here.clone(), 7)
    for thread in joining:
        thread.join(60)
    assert failures == dict.fromkeys((SENDER, 1), "membership 7 was given up by its sender")
    PrefixStore("membership7", here.clone()).set("address of the one that died", b"")
    _until(lambda: not left_behind())


def test_a_sender_that_gives_a_membership_up_while_it_joins_is_free_for_the_next() -> None:
    manifest = Manifest.of({"w": torch.zeros(4)}, 16)
    sender = GroupSender(manifest, gloo_wire(HOST), host=HOST, stall_s=600)
    failures: list[str] = []

    def join() -> None:
        with pytest.raises(RuntimeError) as failed:
            sender.join(1, 2)
        failures.append(str(failed.value))

    joining = threading.Thread(target=join)
    joining.start()
    sender.abandon(1)
    joining.join(60)
    assert failures == ["membership 1 was given up by its sender"]
    sender.join(2, 1)
    sender.close()


def test_who_forms_another_group_leaves_the_one_before_and_its_watch() -> None:
    """Members of the one before would else wait for it."""
    groups = [Answering(), Answering(), Answering()]
    made: Iterator[Any] = iter(groups)
    wire, manifest = Wire(lambda *_: next(made)), Manifest.of({"w": torch.zeros(4)}, 16)
    sender = GroupSender(manifest, wire, host=HOST, stall_s=60)
    sender.join(1, 1)
    sender.join(2, 1)
    assert [group.aborts for group in groups] == [1, 0, 0]
    receiver, before = GroupReceiver(CPU, lambda *_: wire), set(threading.enumerate())
    store = find_store(HOST, sender.rendezvous(), 60)
    PrefixStore("membership3", store.clone()).set("here0", b"")  # the sender's part
    receiver.join(Joining("gloo", [[HOST, sender.rendezvous()]], 1, 2, 3, 60))
    [watch] = {thread for thread in threading.enumerate() if thread.name == "push abandoned"} - before
    receiver.close()
    watch.join(30)
    assert not watch.is_alive()
    assert groups[2].aborts == 1


@pytest.mark.parametrize("find", [True, False])
def test_a_key_that_does_not_come_is_waited_for_no_longer_than_is_said(find: bool) -> None:
    store, number = open_store(HOST, 600 if find else 0.2)
    store = find_store(HOST, number, 0.2) if find else store
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        store.get("nothing")
    assert time.monotonic() - began < 60


def test_an_abandoned_membership_is_left_and_no_other() -> None:
    """Neither do newcomers that are given up cost the others their group, nor the reverse."""
    main, newcomers = Answering(), Stuck()
    made: Iterator[Any] = iter([main, newcomers])
    weights = {"w": torch.zeros(4)}
    sender = GroupSender(Manifest.of(weights, 16), Wire(lambda *_: next(made)), host=HOST, stall_s=600)
    sender.load(weights.items(), 1)
    sender.join(1, 1)
    failures: list[str] = []

    def add() -> None:
        with pytest.raises(RuntimeError) as failed:
            sender.add_newcomers(2, 1)
        failures.append(str(failed.value))

    adding = threading.Thread(target=add)
    adding.start()
    assert newcomers.begun.wait(60)
    sender.abandon(7)
    assert (main.aborts, newcomers.aborts) == (0, 0)
    sender.abandon(2)
    adding.join(60)
    assert failures == ["NCCL communicator was aborted"]
    assert (main.aborts, newcomers.aborts) == (0, 1)
    assert sender.send(1).keys() == {0}
    sender.abandon(2)
    assert main.aborts == 0
    sender.abandon(1)
    assert main.aborts == 1
    with pytest.raises(RuntimeError, match="join comes before send"):
        sender.send(1)


def test_a_member_that_waits_for_a_bucket_leaves_when_its_sender_abandons_the_group() -> None:
    """Others may wait for this one meanwhile, which would else wait until the deadline."""
    weights, stuck = {"w": torch.zeros(4)}, Stuck()
    manifest = Manifest.of(weights, 16)
    sender = GroupSender(manifest, Wire(lambda *_: Answering()), host=HOST, stall_s=600)
    receiver = GroupReceiver(CPU, lambda *_: Wire(lambda *_: stuck))
    forming = threading.Thread(target=sender.join, args=(1, 2))
    forming.start()
    receiver.join(Joining("gloo", [[HOST, sender.rendezvous()]], 1, 2, 1, 600))
    forming.join(60)
    failures: list[str] = []

    def receive() -> None:
        with pytest.raises(RuntimeError) as failed:
            receiver.receive(manifest)
        failures.append(str(failed.value))

    receiving = threading.Thread(target=receive)
    receiving.start()
    assert stuck.begun.wait(60)
    sender.abandon(1)
    receiving.join(30)
    assert failures == ["NCCL communicator was aborted"]


class Failing(Answering):
    """One whose sender is gone."""

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("the sender is gone")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_sender_that_is_gone_ends_what_comes_from_the_others(failing: int) -> None:
    """A bucket of another sender would else be waited for until the deadline."""
    groups: list[Any] = [Stuck(), Stuck()]
    groups[failing] = Failing()
    receiver = GroupReceiver(CPU)
    receiver._groups = [alone(group, None, timeout_s=60) for group in groups]
    weights = {name: torch.zeros(4) for name in "ab"}
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^the sender is gone$"):
        receiver.receive(Manifest.of(weights, 16))
    assert time.monotonic() - began < 30
    assert [group.aborts for group in groups] == [1, 1]


def test_members_that_do_not_come_are_named_before_anything_is_formed_and_the_next_membership_works() -> None:
    formed: list[int] = []

    def form(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        formed.append(world_size)
        return Answering()

    sender = GroupSender(Manifest.of({}, 1), Wire(form), host=HOST, stall_s=0.2)
    with pytest.raises(RuntimeError, match=r"^the group did not form: ranks \[1, 2\] did not come in 0.2 s$"):
        sender.join(1, 3)
    sender.join(2, 1)
    assert formed == [1]
    sender.close()


@pytest.mark.processes  # it waits for seconds
def test_a_member_that_does_not_receive_is_an_error_in_time_and_the_next_membership_works() -> None:
    """Gloo's own deadline ends it."""
    large = {"w": torch.zeros(8 << 20)}  # 32 MiB, more than the sockets hold
    sender = GroupSender(Manifest.of(large, 1), gloo_wire(HOST), host=HOST, stall_s=5)
    groups: list[Group] = []

    def join() -> None:
        groups.append(Group(find_store(HOST, sender.rendezvous(), 60), gloo_wire(HOST), rank=1, **PATIENT))

    joining = threading.Thread(target=join)
    joining.start()
    sender.join(1, 2)
    joining.join()
    sender.load(large.items(), 1)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        sender.send(1)
    assert time.monotonic() - start < 5 + 20
    groups[0].close()
    sender.join(2, 1)
    assert checksum(sender.send(1)) == checksum(sender._digests)
    sender.close()


@pytest.mark.processes  # it waits for seconds
def test_members_leave_a_transfer_by_gloo_that_a_member_holds_up_when_the_sender_abandons_it() -> None:
    """Gloo itself lets an operation that has begun wait until its deadline, also when its connection is closed."""
    large = {"w": torch.zeros(8 << 20)}  # 32 MiB, more than the sockets hold
    manifest = Manifest.of(large, 1)
    sender = GroupSender(manifest, gloo_wire(HOST), host=HOST, stall_s=15)
    receiver, stopped, failures = GroupReceiver(CPU), list[Group](), dict[str, str]()
    place: dict[str, Any] = {"world_size": 4, "membership": 1, "timeout_s": 15}

    def fails(name: str, work: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            with pytest.raises(RuntimeError) as failed:
                work()
            failures[name] = str(failed.value)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def stop(rank: int) -> None:
        """Joins as a member that receives nothing, as one that a signal has stopped."""
        stopped.append(Group(find_store(HOST, sender.rendezvous(), 60), gloo_wire(HOST), rank=rank, **place))

    # Behind one of the two others, from which it would have the weights.
    joins = partial(receiver.join, Joining("gloo", [[HOST, sender.rendezvous()]], 3, 4, 1, 15))
    joining = [threading.Thread(target=work) for work in (joins, partial(stop, 1), partial(stop, 2))]
    for thread in joining:
        thread.start()
    sender.join(1, 4)
    for thread in joining:
        thread.join()
    sender.load(large.items(), 1)
    working = [fails("sender", lambda: sender.send(1)), fails("receiver", lambda: receiver.receive(manifest))]
    time.sleep(0.5)
    began = time.monotonic()
    sender.abandon(1)
    for thread in working:
        thread.join(60)
    assert time.monotonic() - began < 8
    assert failures.keys() == {"sender", "receiver"}
    for group in stopped:
        group.close()
    _until(lambda: not left_behind())
    _until(lambda: FREEING not in {thread.name for thread in threading.enumerate()})
    sender.close()


def test_a_group_that_forms_after_it_was_given_up_is_closed() -> None:
    store, behind, forming, formed = open_store(HOST, 600)[0], Answering(), threading.Event(), threading.Event()

    def form(*_: Any) -> Any:
        forming.set()
        assert formed.wait(60)
        return behind

    def give_up_then() -> None:
        assert forming.wait(60)
        give_up(store.clone(), 1)

    threading.Thread(target=give_up_then).start()
    with pytest.raises(RuntimeError, match="membership 1 was given up by its sender"):
        Group(store, Wire(form), rank=SENDER, world_size=1, membership=1, timeout_s=600)
    formed.set()
    _until(lambda: behind.aborts == 1)


def left_behind() -> list[tuple[str, bool]]:
    """Names of the threads of groups, and whether the process may end without them."""
    return sorted((thread.name, thread.daemon) for thread in threading.enumerate() if thread.name.startswith("push"))


def test_a_failed_join_whose_abort_hangs_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(group_module, "ABORT_S", 0.2)
    stuck = StuckForever()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^the group did not form: no answer in 1 s$"):
        alone(stuck)
    assert time.monotonic() - start < TIMEOUT_S + 20
    assert left_behind() == [("push abort", True), ("push group", True)]
    [line] = logged
    assert line.startswith("membership 1 of a push was left, but its abort has not ended in 0.2 s")
    stuck.given_up.set()
    _until(lambda: not left_behind())
    assert stuck.aborts == 1


def test_a_group_whose_abort_hangs_is_left_in_time_and_once(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(group_module, "ABORT_S", 0.2)
    behind = Answering()
    group = alone(behind)
    behind.stuck = stuck = StuckForever()
    start = time.monotonic()
    group.close()
    assert 0.1 < time.monotonic() - start < 20
    assert left_behind() == [("push abort", True)]
    group.close()
    assert (behind.aborts, stuck.aborts, len(logged)) == (1, 1, 1)
    with pytest.raises(RuntimeError, match="this member has left the group"):
        group.broadcast(torch.zeros(3, dtype=torch.uint8))
    stuck.given_up.set()
    _until(lambda: not left_behind())


class Refusing(Answering):
    """One whose abort fails, as NCCL's does at the end of its own deadline."""

    def abort(self) -> None:
        raise RuntimeError("NCCL timeout in abort")


def test_an_abort_that_fails_is_told_and_the_group_is_left(logged: list[str]) -> None:
    group = alone(Refusing())
    group.close()
    assert logged == ["the abort of a push's group failed: NCCL timeout in abort"]
    assert left_behind() == []
    group.close()


def _until(came: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not came():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_aborted_is_neither_used_nor_aborted_again() -> None:
    behind = Answering()
    group = alone(behind)
    behind.stuck = Stuck()
    failures: list[Exception] = []

    def send() -> None:
        try:
            group.broadcast(torch.zeros(3, dtype=torch.uint8))
        except RuntimeError as error:
            failures.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    assert behind.stuck.begun.wait(5)
    group.close()
    sending.join(5)
    assert [str(error) for error in failures] == ["NCCL communicator was aborted"]
    group.close()
    assert behind.aborts == 1
    with pytest.raises(RuntimeError, match="this member has left the group"):
        group.broadcast(torch.zeros(3, dtype=torch.uint8))


class Pair:
    """A sender and a receiver as with NCCL: weights and model on a device, and a wire that reads and writes there."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.weights = {f"w{i}": torch.full((4,), float(i), device=DEVICE) for i in range(5)}
        self.manifest = Manifest.of(self.weights, bucket_bytes=16)
        self.sender = GroupSender(self.manifest, CARRIED, host=HOST, stall_s=60, device=DEVICE, on_gpu=on_gpu)
        self.receiver = GroupReceiver(DEVICE, lambda backend, host, device, stall_s: CARRIED)
        joining = Joining("nccl", [[HOST, self.sender.rendezvous()]], 1, 2, 1, 60, on_gpu=on_gpu)
        thread = threading.Thread(target=self.receiver.join, args=(joining,))
        thread.start()
        self.sender.join(1, 2)
        thread.join()

    def receive(self) -> tuple[threading.Thread, list[str]]:
        """A thread that receives, and its checksum once it has."""
        received: list[str] = []
        thread = threading.Thread(target=lambda: received.append(self.receiver.receive(self.manifest)))
        thread.start()
        return thread, received

    def loaded(self, receiver: GroupReceiver | None = None) -> dict[str, list[float]]:
        """The received weights, brought to the device as vLLM's model takes them."""
        return {
            name: tensor.tolist()
            for bucket, data in (receiver or self.receiver).buckets()
            for name, tensor in self.manifest.cut(bucket, data.to(DEVICE, non_blocking=True))
        }

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


EXPECTED = {f"w{i}": [float(i)] * 4 for i in range(5)}
TOTAL = 5 * 16


@pytest.mark.parametrize("on_gpu", [False, True], ids=["host", "gpu"])
def test_a_sender_holds_copies_of_its_weights_and_none_of_its_tensors(on_gpu: bool) -> None:
    """Weights that ZeRO 3 gathered for a moment must be free again as soon as their bucket is filled."""
    pair = Pair(on_gpu=on_gpu)

    def gathered() -> Any:
        for name, tensor in pair.weights.items():
            yield name, tensor
            tensor.fill_(-1)  # DeepSpeed takes its memory back

    pair.sender.load(gathered(), 1)
    thread, received = pair.receive()
    assert checksum(pair.sender.send(1)) == checksum(pair.sender._digests)
    thread.join()
    assert received == [checksum(pair.sender._digests)]
    assert pair.loaded() == EXPECTED
    pair.close()


def sent_at_once(pair: Pair, device: FakeDevice) -> None:
    """A push in which each bucket is sent as soon as it is packed."""
    sent = threading.Semaphore(1)
    broadcast = pair.sender._group.broadcast  # type: ignore[union-attr]

    def told(data: torch.Tensor) -> None:
        broadcast(data)
        sent.release()

    pair.sender._group.broadcast = told  # type: ignore[union-attr, method-assign]

    def gathered() -> Any:
        for weight in pair.weights.items():
            assert sent.acquire(timeout=60)
            yield weight

    with device.labelled("sender"):
        loading = threading.Thread(target=pair.sender.load, args=(gathered(), 1))
        loading.start()
        pair.sender.send(1)
        loading.join()


def sent_later(pair: Pair, device: FakeDevice) -> None:
    """A push that is staged first."""
    with device.labelled("sender"):
        pair.sender.load(pair.weights.items(), 1)
        pair.sender.send(1)


@pytest.mark.parametrize(
    ("on_gpu", "send", "expected"),
    [
        (True, sent_at_once, {}),
        (True, sent_later, {}),
        (False, sent_at_once, {"sender": (TOTAL, 0), "replica": (TOTAL, TOTAL)}),
        # All but the last two buckets come back to be sent.
        (False, sent_later, {"sender": (TOTAL, TOTAL - 2 * 16), "replica": (TOTAL, TOTAL)}),
    ],
)
def test_bytes_that_a_push_copies_between_host_and_device(
    on_gpu: bool, send: Any, expected: dict[str, tuple[int, int]]
) -> None:
    with FakeDevice().counting() as device:
        with device.labelled("replica"):
            pair = Pair(on_gpu=on_gpu)
            thread, received = pair.receive()
        send(pair, device)
        thread.join()
        with device.labelled("replica"):
            assert pair.loaded() == EXPECTED
        assert received == [checksum(pair.sender._digests)]
        assert all(device.has(data) == on_gpu for _, data in pair.receiver.buckets())
        pair.close()
    assert device.copied == {
        (side, direction): size
        for side, sizes in expected.items()
        for direction, size in zip((DOWN, UP), sizes, strict=True)
        if size
    }


def test_a_bucket_arrives_while_the_one_before_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(on_gpu=False)
    arrived = threading.Semaphore(0)
    waited: list[list[bool]] = []
    broadcast, stage = pair.receiver._groups[0].broadcast, pair.receiver._staged_from

    def told(data: torch.Tensor) -> None:
        broadcast(data)
        arrived.release()

    def slowly(data: torch.Tensor, take: Any) -> bytes:
        if len(waited) < 4:  # the last one is followed by none
            waited.append([arrived.acquire(timeout=60) for _ in range(2 if not waited else 1)])
        return stage(data, take)

    pair.receiver._groups[0].broadcast = told  # type: ignore[method-assign]
    monkeypatch.setattr(pair.receiver, "_staged_from", slowly)
    pair.sender.load(pair.weights.items(), 1)
    thread, received = pair.receive()
    pair.sender.send(1)
    thread.join()
    assert waited == [[True, True], [True], [True], [True]]
    assert received == [checksum(pair.sender._digests)]
    assert pair.loaded() == EXPECTED
    pair.close()


def test_a_gpu_stages_a_bucket_once_it_is_there_and_beside_what_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order in which CUDA is told; there is none here to keep it."""
    told: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            told.append(f"another stream of {device}")

        def wait_event(self, event: "Event") -> None:
            told.append("waits for it")

    class Event:
        def record(self, stream: str) -> None:
            told.append(f"mark {stream}")

    @contextmanager
    def using(stream: Stream) -> Iterator[None]:
        told.append("in")
        yield
        told.append("out")

    fakes = {
        "Stream": Stream,
        "Event": Event,
        "stream": using,
        "current_stream": lambda device: "the arrivals' stream",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def work() -> bytes:
        told.append("work")
        return b"digest"

    gpu = torch.device("cuda", 1)
    receiver = GroupReceiver(gpu)
    done = receiver._beside(0, gpu, work)
    told.append("the next bucket")
    assert done() == b"digest"
    marked, staged = "mark the arrivals' stream", ["waits for it", "in", "work", "out"]
    assert told == ["another stream of cuda:1", marked, "the next bucket", *staged]
    # Its next one goes through the same stream, for whose later work torch keeps the memory of such results.
    told.clear()
    receiver._beside(0, gpu, work)()
    assert told == [marked, *staged]
    told.clear()
    receiver._beside(1, gpu, work)()
    assert told == ["another stream of cuda:1", marked, *staged]


def test_a_newcomer_gets_the_copy_while_the_group_of_the_others_stays() -> None:
    for on_gpu in (False, True):
        pair = Pair(on_gpu=on_gpu)
        newcomer = GroupReceiver(DEVICE, lambda backend, host, device, stall_s: CARRIED)
        pair.sender.load(pair.weights.items(), 1)
        for tensor in pair.weights.values():
            tensor.fill_(-1)  # the next step
        joining = Joining("nccl", [[HOST, pair.sender.rendezvous()]], 1, 2, 2, 60, on_gpu=on_gpu)
        adding = threading.Thread(target=pair.sender.add_newcomers, args=(2, 2))
        adding.start()
        newcomer.join(joining)
        assert newcomer.receive(pair.manifest) == checksum(pair.sender._digests)
        adding.join()
        assert pair.loaded(newcomer) == EXPECTED
        newcomer.close()
        pair.sender.load(pair.weights.items(), 2)
        thread, received = pair.receive()
        sent = checksum(pair.sender.send(2))
        thread.join()
        assert received == [sent]
        pair.close()


def test_torchs_settings_are_ours_only_while_our_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SETTINGS
    monkeypatch.setenv(first, "theirs")
    monkeypatch.delenv(second, raising=False)
    with environment(SETTINGS):
        assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    assert (os.environ[first], os.environ.get(second)) == ("theirs", DEFAULTS[second])


def test_no_variable_is_added_or_removed_once_they_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either would move the others under native threads that read them."""
    for name in DEFAULTS:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    reserve(os.environ)
    assert DEFAULTS.items() <= os.environ.items()
    changed: list[str] = []
    put, remove = os.putenv, os.unsetenv

    def puts(name: bytes, value: bytes) -> None:
        changed.append(name.decode())
        put(name, value)

    def removes(name: bytes) -> None:
        changed.append(f"no {name.decode()}")
        remove(name)

    monkeypatch.setattr(os, "putenv", puts)
    monkeypatch.setattr(os, "unsetenv", removes)
    nccl_wire(CPU, stall_s=59.5)
    with environment(SETTINGS):
        pass
    reserve(os.environ)
    assert set(changed) == set(DEFAULTS)
    assert os.environ.items() >= (DEFAULTS | {GIVE_UP: "65"}).items()
    monkeypatch.undo()


def test_torch_gives_up_a_communicator_soon_after_the_group_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of half an hour would keep a thread and the communicator's memory for as long."""
    monkeypatch.setenv(GIVE_UP, DEFAULTS[GIVE_UP])
    nccl_wire(CPU, stall_s=59.5)
    assert os.environ[GIVE_UP] == "65"
    nccl_wire(CPU, stall_s=3)  # torch has read it
    assert os.environ[GIVE_UP] == "65"


def test_groups_of_several_senders_are_left_together(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setattr(receiver_module, "ABORT_S", 2)
    groups, behind = [], []
    for _ in range(4):
        process_group = Answering()
        groups.append(alone(process_group))
        process_group.stuck = StuckForever()
        behind.append(process_group.stuck)
    receiver = GroupReceiver(CPU)
    receiver._groups = groups
    start = time.monotonic()
    receiver.close()
    # All have begun, before the first was given up.
    assert [each.aborts for each in behind] == [1] * 4
    assert 1.9 < time.monotonic() - start < 4 * 2  # what one after the other would take
    assert len(logged) == 4
    for each in behind:
        each.given_up.set()
    _until(lambda: not left_behind())


def test_groups_that_hang_are_left_within_the_deadline_of_the_next(logged: list[str]) -> None:
    process_group = Answering()
    receiver = GroupReceiver(CPU)
    receiver._groups = [alone(process_group)]
    process_group.stuck = stuck = StuckForever()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="membership 1 was given up before this worker came to join it"):
        receiver.join(Joining("gloo", [[HOST, 1]], 1, 2, 1, 60, time.monotonic() + 0.2))
    assert time.monotonic() - start < group_module.ABORT_S - 0.5
    stuck.given_up.set()
    _until(lambda: not left_behind())


def test_nothing_stays_on_the_gpu_that_is_packed_after_a_failed_send() -> None:
    pair = Pair(on_gpu=False)
    failed = threading.Event()

    def gathered() -> Any:
        for index, weight in enumerate(pair.weights.items()):
            if index == 2:
                assert failed.wait(60)
            yield weight

    loading = threading.Thread(target=pair.sender.load, args=(gathered(), 1))
    loading.start()
    pair.receiver.close()  # the other end is gone
    with pytest.raises(RuntimeError):
        pair.sender.send(1)
    failed.set()
    loading.join()
    assert not pair.sender._ahead
    # The next push is ahead of its sending again.
    pair.sender.load(pair.weights.items(), 2)
    assert [number for number, _ in pair.sender._ahead] == [3, 4]
    pair.close()


def test_buckets_arrive_in_an_area_that_the_stream_before_is_done_with(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    manifest, gpu = Manifest.of({"a": torch.zeros(4)}, 16), torch.device("cuda", 1)  # which is not there
    receiver = GroupReceiver(gpu)
    receiver._staging = gpu
    memory = torch.zeros(Buckets.size(manifest), dtype=torch.uint8)

    class Stream:
        def synchronize(self) -> None:
            told.append("waited")

    def empty(*sizes: Any, device: torch.device, **options: Any) -> torch.Tensor:
        told.append(f"memory of {device}")
        return memory

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert receiver._area(manifest)[0].data_ptr() == memory.data_ptr()
    assert told == ["memory of cuda:1", "waited"]
