"""Ray heads of one folder and of several: which of them are one, and what killed ones leave."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.deployment import cluster

REPO = Path(__file__).parents[2]


def silent(text: str) -> None:
    """Says nothing."""


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if told(process.status, "zombie") != psutil.STATUS_ZOMBIE]


UP = "from orchestrator.deployment import cluster; print(cluster.start(lambda text: None).address)"


def heads(folder: Path) -> list[psutil.Process]:
    """The heads that run because of this folder."""
    actual = [process for process in psutil.process_iter() if "ray.scripts.scripts" in told(process.cmdline, [])]
    return [process for process in actual if told(process.cwd, "") == str(folder)]


def told(ask: Callable[[], Any], instead: Any) -> Any:
    try:
        return ask()
    except psutil.Error:
        return instead


@pytest.mark.exhaustive  # four heads; a killed one: tests/unit/orchestrator/deployment/test_cluster_stop.py
def test_two_that_start_a_head_in_one_folder_share_it_and_what_a_killed_one_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    started = [
        subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    addresses = {process.communicate(timeout=240)[0].strip() for process in started}
    try:
        [running] = heads(tmp_path)
        first = cluster.running()
        assert first
        assert (first.pid, {first.address}) == (running.pid, addresses)
        family = first.processes()
        running.kill()
        while living([running]):
            time.sleep(0.05)
        assert cluster.running() is None
        second = cluster.start(silent)
        assert second.address != first.address
        psutil.wait_procs(family, timeout=30)  # told to end before the new head began; agents take a moment
        assert living(family) == []
        assert not Path(first.folder).exists()
        # A plain ray.init() of anything else on this machine looks for its head elsewhere.
        told_to_others = Path(second.folder, "ray", "ray_current_cluster")
        while not told_to_others.exists():
            time.sleep(0.05)
        assert told_to_others.read_text() == second.address
        assert not Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster").exists()
        other = tmp_path / "other" / "ray.json"
        beside = cluster.start(silent, other)
        assert beside.folder != second.folder
        assert cluster.applications(second) == cluster.applications(beside) == {}
        cluster.stop(beside, other)
        assert second.alive
    finally:
        for left in (cluster.last(), cluster.last(tmp_path / "other" / "ray.json")):
            if left:
                cluster.stop(left)
    assert heads(tmp_path) == []
