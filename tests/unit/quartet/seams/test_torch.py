"""The seam with torch. The permission for AMX's tiles: test_matrix_tiles.py; NCCL's groups need a GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

from quartet.seams import torch as seam


def test_a_gloo_group_forms_beside_the_default_one_and_carries_bytes() -> None:
    group = seam.gloo_group(distributed.HashStore(), 0, 1, timedelta(seconds=20), "127.0.0.1")
    data = torch.arange(5, dtype=torch.uint8)
    group.broadcast([data], distributed.BroadcastOptions()).wait()
    assert data.tolist() == [0, 1, 2, 3, 4]
    assert not distributed.is_initialized() or group is not distributed.group.WORLD


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
