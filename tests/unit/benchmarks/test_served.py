"""One application on a head of its own, and the engine beside it in a process by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rollout import by_itself
from benchmarks.served import served
from orchestrator.deployment import cluster


def test_a_head_whose_start_is_broken_off_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopped = []

    def broken_off(*_: Any, **__: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(cluster, "start", broken_off)
    monkeypatch.setattr(cluster, "last", lambda state: state)
    monkeypatch.setattr(cluster, "stop", lambda started, state: stopped.append((started, state)))
    with pytest.raises(SystemExit), served(tmp_path, {"name": "reward"}, {}, (1, 2), {}):
        raise AssertionError("never up")
    assert stopped == [(tmp_path / "ray.json", tmp_path / "ray.json")]


def test_a_process_by_itself_has_the_threads_that_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = torch.get_num_threads() + 1
    monkeypatch.setenv("OMP_NUM_THREADS", str(wanted))
    with by_itself() as process:
        assert process.submit(torch.get_num_threads).result() == wanted
