"""The seam with torch. The permission for AMX's tiles: test_matrix_tiles.py; NCCL's groups need a GPU."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, nn

from quartet.seams import torch as seam


def test_a_gloo_group_forms_beside_the_default_one_and_carries_bytes() -> None:
    group = seam.gloo_group(distributed.HashStore(), 0, 1, timedelta(seconds=20), "127.0.0.1")
    data = torch.arange(5, dtype=torch.uint8)
    group.broadcast([data], distributed.BroadcastOptions()).wait(timedelta(seconds=20))
    assert data.tolist() == [0, 1, 2, 3, 4]
    assert not distributed.is_initialized() or group is not distributed.group.WORLD


def three_members() -> list[seam.GlooGroup]:
    """A group's members, whose operations take up to ten minutes."""
    store, forming = distributed.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(3) as members:
        return list(members.map(lambda rank: seam.gloo_group(store, rank, 3, forming, "127.0.0.1"), range(3)))


def broadcast(group: seam.GlooGroup) -> None:
    """Takes part in a broadcast by the first member."""
    options = distributed.BroadcastOptions()
    options.timeout = timedelta(minutes=10)
    group.broadcast([torch.zeros(1 << 20, dtype=torch.uint8)], options).wait(options.timeout)


def test_a_member_that_aborts_a_gloo_group_waits_no_longer_and_its_connections_are_closed() -> None:
    groups = three_members()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as waiting:
        ends = [waiting.submit(broadcast, group) for group in groups[1:]]
        time.sleep(0.3)  # both wait for the first member by now; before, they would fail as well
        groups[1].abort()
        assert isinstance(ends[0].exception(60), RuntimeError)
        assert not ends[1].done()
        with pytest.raises(RuntimeError):
            broadcast(groups[0])
        groups[0].abort()
        assert isinstance(ends[1].exception(60), RuntimeError)
    groups[2].abort()
    for group in groups:
        group.abort()  # once more does nothing
        with pytest.raises(RuntimeError, match=r"^the group was aborted$"):
            broadcast(group)
    assert time.monotonic() - began < 60


def test_a_process_that_ends_right_after_an_abort_ends_as_any_other() -> None:
    """In a process of its own, of which the group is freed while it ends."""
    lines = [
        "from concurrent.futures import ThreadPoolExecutor; from datetime import timedelta; import torch",
        "from torch import distributed; from quartet.seams.torch import gloo_group",
        "store, timeout = distributed.HashStore(), timedelta(seconds=20)",
        "form = lambda rank: gloo_group(store, rank, 2, timeout, '127.0.0.1')",
        "with ThreadPoolExecutor(2) as members: group, other = members.map(form, range(2))",
        "options = distributed.BroadcastOptions(); options.rootRank, options.timeout = 1, timeout",
        "work = group.broadcast([torch.zeros(1 << 20, dtype=torch.uint8)], options); group.abort(); del work",
    ]
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


class Operation:
    """One of torch's, which never ends by itself."""

    def __init__(self) -> None:
        self.ended, self.error = threading.Event(), ""

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize(
    ("timeout_s", "aborts", "error", "expected"),
    [
        (600, True, "", "the group was aborted"),
        (0.5, False, "", "Operation timed out!"),
        (600, False, "connection closed", "connection closed"),
        (600, False, "", None),
    ],
)
def test_an_operation_of_a_gloo_group_is_waited_for_until_it_ends_or_is_late_or_aborted(
    timeout_s: float, aborts: bool, error: str, expected: str | None
) -> None:
    """Gloo lets one that has begun wait on, though its connection is closed."""
    operation: Any = Operation()
    operation.error, aborted, began = error, threading.Event(), time.monotonic()
    late = threading.Timer(0.4, aborted.set if aborts else operation.ended.set if timeout_s > 1 else lambda: None)
    late.start()
    failed = ""
    try:
        seam.GlooWork(operation, aborted).wait(timedelta(seconds=timeout_s))
    except RuntimeError as failure:
        failed = str(failure)
    assert failed == (expected or "")
    assert 0.3 < time.monotonic() - began < 30
    late.join()


@pytest.mark.parametrize("given", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_environment_says_how_memory_is_taken(given: str) -> None:
    """In a process of its own, as torch keeps the setting."""
    lines = [
        "import torch; from quartet.seams.torch import grow_segments; grow_segments(torch.device('cpu'))",
        "print(torch._C._accelerator_getAllocatorSettings())",
    ]
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment |= {given: "max_split_size_mb:64"} if given else {}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == (environment[given] if given else "expandable_segments:True")


def test_a_machine_that_refuses_segments_that_grow_gives_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []

    def first_tensor(size: int, *, device: torch.device) -> None:
        if settings[-1] == "expandable_segments:True":
            raise RuntimeError("CUDA driver error: operation not supported")

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch, "empty", first_tensor)
    seam.grow_segments(torch.device("cuda"))
    assert settings == ["expandable_segments:True", "expandable_segments:False"]


def test_every_kind_of_dropout_is_found() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    model = nn.Sequential(*(kind(0.5) for kind in kinds), nn.Linear(1, 1))
    assert [type(found) for found in seam.dropouts(model)] == list(kinds)


def test_each_operator_is_looked_at_but_for_views() -> None:
    class Seen(seam.Operators):
        def look(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
            seen.append((name, [*map(seam.storage_of, given)], [*map(seam.storage_of, made)]))

    seen: list[tuple[str, list[int], list[int]]] = []
    first, second = torch.ones(4), torch.ones(2)
    with Seen():
        first[:2].copy_(second)
        total = torch.cat([first, second])
    one, two, three = map(seam.storage_of, (first, second, total))
    assert seen == [("copy_", [one, two], [one]), ("cat", [one, two], [three])]
    assert len({one, two, three}) == 3
