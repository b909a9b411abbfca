"""The group as NCCL runs it, on a CPU: through a wire with a device of its own, with gloo or nothing behind it."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import Store

from services.common.weight_transfer.groups import group as group_module
from services.common.weight_transfer.groups.gloo import gloo_wire
from services.common.weight_transfer.groups.group import SENDER, Group, Wire
from services.common.weight_transfer.groups.nccl import GIVE_UP, SETTINGS, environment, nccl_wire
from services.common.weight_transfer.manifest import Manifest
from services.common.weight_transfer.meeting import find_store, open_store
from services.common.weight_transfer.memory.buckets import checksum
from services.common.weight_transfer.receiver import GroupReceiver, Joining
from services.common.weight_transfer.sender import GroupSender

HOST = "127.0.0.1"
CPU = torch.device("cpu")
CARRIED = Wire(gloo_wire(HOST).form, CPU)
"""A wire like NCCL's: buckets are copied to a device and from it."""
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


def alone(process_group: Any) -> Group:
    """A group of one member, with this behind it."""
    wire = Wire(lambda *_: process_group, CPU)
    return Group(open_store(HOST, TIMEOUT_S)[0], wire, rank=SENDER, world_size=1, membership=1, timeout_s=TIMEOUT_S)


def test_what_is_carried_arrives_and_the_carrier_is_kept_from_bucket_to_bucket() -> None:
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
    assert [len(group._carrier) for group in groups.values()] == [200, 200]
    for group in groups.values():
        group.close()


def test_a_member_that_never_comes_is_an_error_before_anything_is_formed() -> None:
    def form(store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
        raise AssertionError("NCCL would wait in here")

    start = time.monotonic()
    with pytest.raises(RuntimeError):
        Group(open_store(HOST, TIMEOUT_S)[0], Wire(form, CPU), rank=SENDER, **PLACE)
    assert TIMEOUT_S - 0.1 < time.monotonic() - start < TIMEOUT_S + 20


def test_a_worker_that_comes_late_gives_up_with_the_others_and_is_free_for_the_next_attempt() -> None:
    _, number = open_store(HOST, 60)
    receiver = GroupReceiver(CPU)

    def join(left_s: float) -> None:
        receiver.join(Joining("gloo", [[HOST, number]], 1, 2, 1, HOST, 60, time.monotonic() + left_s))

    with pytest.raises(RuntimeError, match="membership 1 was given up before this worker came to join it"):
        join(-0.1)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        join(0.5)
    assert 0.4 < time.monotonic() - start < 30


def test_a_member_that_dies_after_the_roll_was_called_does_not_hold_the_others_up() -> None:
    """The caller's thread is free at the deadline, though NCCL's first operation never ends by itself."""
    stuck = Stuck()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^the group did not form: no answer in 1 s$"):
        alone(stuck)
    assert time.monotonic() - start < TIMEOUT_S + 20
    assert stuck.aborted.wait(5)
    assert stuck.aborts == 1


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


def test_a_sender_holds_copies_of_its_weights_and_none_of_its_tensors() -> None:
    """Weights that ZeRO 3 gathered for a moment must be free again as soon as their bucket is filled."""
    weights = {f"w{i}": torch.full((4,), float(i)) for i in range(3)}
    manifest = Manifest.of(weights, bucket_bytes=16)
    sender = GroupSender(manifest, CARRIED, host=HOST, stall_s=60)
    receiver = GroupReceiver(CPU)
    joining = Joining("gloo", [[HOST, sender.rendezvous()]], 1, 2, 1, HOST, 60)
    # The receiver's wire is gloo's own; the roll call is the one thing in which they differ.
    sender._wire = gloo_wire(HOST)
    thread = threading.Thread(target=receiver.join, args=(joining,))
    thread.start()
    sender.join(1, 2)
    thread.join()

    def gathered() -> Any:
        for name, tensor in weights.items():
            yield name, tensor
            tensor.fill_(-1)  # DeepSpeed takes its memory back

    sender.load(gathered(), 1)
    received: list[str] = []
    thread = threading.Thread(target=lambda: received.append(receiver.receive(manifest)))
    thread.start()
    assert checksum(sender.send(1)) == checksum(sender._digests)
    thread.join()
    assert received == [checksum(sender._digests)]
    values = [t.tolist() for bucket, data in receiver.buckets() for _, t in manifest.cut(bucket, data)]
    assert values == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    receiver.close()
    sender.close()


def test_torchs_settings_are_ours_only_while_our_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = SETTINGS
    monkeypatch.setenv(first, "theirs")
    monkeypatch.delenv(second, raising=False)
    with environment(SETTINGS):
        assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    assert (os.environ[first], os.environ.get(second)) == ("theirs", None)


def test_torch_gives_up_a_communicator_soon_after_the_group_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of half an hour would keep a thread and the communicator's memory for as long."""
    monkeypatch.setenv(GIVE_UP, "")  # so that it is restored
    monkeypatch.delenv(GIVE_UP)
    nccl_wire(CPU, stall_s=59.5)
    assert os.environ[GIVE_UP] == "65"
    nccl_wire(CPU, stall_s=3)  # torch has read it
    assert os.environ[GIVE_UP] == "65"
