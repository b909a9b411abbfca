"""The transport of weights is chosen by the places of the learner and the replicas."""

import os
from pathlib import Path

import pytest

from orchestrator.push.transport import choose
from quartet.config.base import ConfigError
from quartet.weight_transfer.place import Place, has_room, machine
from quartet.weight_transfer.registry import Applicant, Ticket
from tests.newcomers import nobody_looks
from tests.unit.fake_fleet import FakeSource, Fleet, make_pusher

CPU, OTHER_CPU = Place("m"), Place("n")
GPU_0, GPU_1, GPU_2 = (Place("m", (f"GPU-{number}",)) for number in range(3))
FAR = Place("n", ("GPU-9",))
PAIR = Place("n", ("GPU-7", "GPU-8"))


@pytest.mark.parametrize(
    ("sender", "replicas", "expected"),
    [
        (CPU, [CPU, CPU], "ipc"),
        (CPU, [CPU, OTHER_CPU], "gloo"),
        (GPU_0, [GPU_1, GPU_2], "ipc"),  # one machine: fewer copies than NCCL
        (GPU_0, [GPU_0], "ipc"),
        (GPU_0, [GPU_1, FAR], "nccl"),
        (GPU_0, [GPU_1, PAIR], "nccl"),
        (GPU_0, [GPU_0, FAR], "gloo"),  # the GPU is shared
        (CPU, [FAR], "gloo"),
        (GPU_0, [OTHER_CPU], "gloo"),
        (Place("", ("GPU-0",)), [GPU_1, GPU_2], "nccl"),  # no room in shared memory
        (Place(""), [CPU], "gloo"),
    ],
)
def test_auto_takes_the_fewest_copies_to_everyone(sender: Place, replicas: list[Place], expected: str) -> None:
    assert choose("auto", [sender], {f"r{i}": place for i, place in enumerate(replicas)}) == expected


@pytest.mark.parametrize(
    ("asked", "senders", "replicas", "reason"),
    [
        ("nccl", [CPU], {"a": GPU_1}, "the learner is on a CPU"),
        ("nccl", [GPU_0, CPU], {"a": GPU_1}, "the learner is on a CPU"),
        ("nccl", [GPU_0], {"a": GPU_1, "b": CPU}, "b is on a CPU"),
        ("nccl", [GPU_0], {"a": GPU_0}, "the learner and a share the GPU GPU-0, which NCCL refuses"),
        ("nccl", [GPU_0], {"a": GPU_1, "b": GPU_1}, "a and b share the GPU GPU-1, which NCCL refuses"),
        (
            "ipc",
            [CPU],
            {"a": CPU, "b": OTHER_CPU, "c": FAR},
            "b, c are not on the learner's machine, or not in its container or of its user",
        ),
        ("ipc", [CPU, OTHER_CPU], {"a": CPU}, "the learner has no shared memory .*, or is on several machines"),
        ("cuda-ipc", [CPU], {"a": GPU_1}, "the learner is on a CPU"),
        ("cuda-ipc", [GPU_0], {"a": GPU_0, "b": CPU}, "b is on a CPU"),
        ("cuda-ipc", [GPU_0], {"a": GPU_0, "b": GPU_1, "c": PAIR}, "b, c are not on the learner's GPU GPU-0"),
        ("cuda-ipc", [GPU_0, GPU_1], {"a": GPU_0}, "the learner's senders are on several GPUs"),
    ],
)
def test_what_cannot_be_is_said_before_it_is_tried(
    asked: str, senders: list[Place], replicas: dict[str, Place], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^orchestrator.weights.backend: {asked}, but {reason}; set it to auto$"):
        choose(asked, senders, replicas)


def test_what_was_asked_for_is_taken_where_it_reaches_everyone() -> None:
    assert choose("gloo", [GPU_0], {"a": GPU_0}) == "gloo"
    assert choose("nccl", [GPU_0], {"a": GPU_1}) == "nccl"
    assert choose("cuda-ipc", [GPU_0], {"a": GPU_0, "b": GPU_0}) == "cuda-ipc"


async def test_the_way_follows_the_members_and_another_one_is_a_new_group() -> None:
    source = FakeSource()
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, backend="auto")
    await pusher.push(1)
    fleet.add(b=1)
    fleet.engines["b"].place = OTHER_CPU
    await pusher.push(2)
    fleet.remove("b")
    await pusher.push(3)
    opened = [call[1] for call in source.calls if call[0] == "rendezvous"]
    assert list(dict.fromkeys(opened)) == ["ipc", "gloo"]
    assert opened[-1] == "ipc"
    assert [engine.joined[-1]["backend"] for engine in fleet.engines.values()] == ["ipc"]
    assert [join["backend"] for join in fleet.engines["a"].joined] == ["ipc", "gloo", "ipc"]
    assert fleet.versions == {"a": 3}


async def test_a_wrong_choice_ends_the_push_before_the_weights_are_gathered() -> None:
    source = FakeSource()
    fleet = Fleet(source, a=1)
    fleet.engines["a"].place = OTHER_CPU
    with pytest.raises(ConfigError, match="ipc, but a is not on the learner's machine"):
        await make_pusher(fleet, backend="ipc").push(1)
    assert source.calls == []
    assert fleet.phases == ["discover"]


async def test_a_newcomer_that_is_not_reached_waits_for_the_push_that_reaches_it() -> None:
    source = FakeSource()
    fleet = Fleet(source, a=1)
    pusher = make_pusher(fleet, backend="auto")
    await pusher.push(1)
    told: dict[str, Ticket | None] = {}

    async def deliver(tickets: dict[str, Ticket | None]) -> None:
        told.update(tickets)

    await pusher.add_newcomers({"near": Applicant(1, CPU), "far": Applicant(1, OTHER_CPU)}, deliver, nobody_looks)
    assert told["far"] is None
    assert told["near"] is not None
    assert source.calls[-1] == ("add_newcomers", 2, 2)
    calls = len(source.calls)
    await pusher.add_newcomers({"farther": Applicant(1, OTHER_CPU)}, deliver, nobody_looks)
    assert told["farther"] is None
    assert len(source.calls) == calls  # the learner forms no group with nobody


def test_a_machine_is_the_shared_memory_that_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same memory, processes that see each other, and one user: without one of these it cannot be opened."""
    boot, processes, none = tmp_path / "boot_id", tmp_path / "pid", tmp_path / "none"
    boot.write_text("b\n")
    processes.touch()
    here = machine(tmp_path, boot, processes)
    assert here == f"b:{tmp_path.stat().st_dev}:{processes.stat().st_ino}:{os.getuid()}"
    assert machine(Path("/proc"), boot, processes) != here
    assert machine(tmp_path, boot, boot) != here  # a container with processes of its own
    assert [machine(none, boot, processes), machine(tmp_path, none, processes), machine(tmp_path, boot, none)] == [
        ""
    ] * 3
    assert machine() == machine() != ""
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert machine(tmp_path, boot, processes) != here
    assert has_room(1, tmp_path)
    assert not has_room(1 << 60, tmp_path)
    assert not has_room(0, tmp_path / "none")
