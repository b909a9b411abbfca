"""A Ray head of a folder: who may talk to it, and what it leaves."""

import os
import subprocess
import sys
import time
import urllib.error
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


def test_a_head_has_a_secret_of_its_own_and_leaves_the_home_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, state = tmp_path / "home", tmp_path / ".quartet" / "cluster.json"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of something else that this user runs")
    head = cluster.start(silent, state)
    token, folder = Path(head.token), Path(head.folder)
    try:
        assert cluster.applications(head) == {}
        assert cluster.start(silent, state) == head
        assert token.stat().st_mode & 0o777 == 0o600
        assert {path.stat().st_mode & 0o777 for path in (folder, state.parent)} == {0o700}
        family = head.processes()
        assert head.pid in {process.pid for process in family}
        assert {"raylet", "gcs_server"} <= {process.name() for process in family}
        secret = token.read_text()
        token.write_text("another")
        with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
            cluster.applications(head)
        token.write_text(secret)
    finally:
        cluster.stop(head, state)
    assert list(home.iterdir()) == []
    assert sorted(path.name for path in state.parent.iterdir()) == ["lock", "logs", "ray.log"]
    assert (state.parent / "logs" / "gcs_server.out").exists()
    assert not folder.exists()
    assert living(family) == []


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


@pytest.mark.exhaustive  # four heads; what a killed one leaves: tests/unit/orchestrator/deployment/test_stop.py
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
