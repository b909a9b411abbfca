"""Ends a head: all its processes, and its files but the logs. Plain processes stand in for Ray's."""

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.deployment import cluster, head_record, privacy
from orchestrator.deployment.head_record import HeadRecord
from orchestrator.deployment.lock import held
from orchestrator.deployment.processes import uptime_at_start
from tests.unit.marked import start_marked

pytestmark = pytest.mark.processes

SECRET = secrets.token_hex(32)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "ray.json"


@pytest.fixture
def head(state: Path) -> Iterator[cluster.Cluster]:
    """Two processes, of which the first is the head, and what they wrote."""
    folder, token = privacy.make_folder(SECRET), state.with_name("token")
    logs = folder / "ray" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "gcs_server.out").write_text("it was me")
    (logs.parent.parent / "session_latest").symlink_to(logs.parent)
    privacy.write_token(token)
    started = [start_marked(SECRET, RAY_TMPDIR=str(folder)) for _ in range(2)]
    created = uptime_at_start(psutil.Process(started[0].pid))
    record = HeadRecord(pid=started[0].pid, created=created, gcs=1, dashboard=2, name=folder.name, secret=SECRET)
    head_record.write(state, record)
    made = cluster.last(state)
    assert made
    assert (made.address, made.dashboard) == ("127.0.0.1:1", "http://127.0.0.1:2")
    assert (made.token, made.folder) == (str(token), str(folder))
    yield made
    for process in started:
        process.kill()
        process.wait()


def test_a_head_that_is_stopped_leaves_its_logs_only(head: cluster.Cluster, state: Path) -> None:
    assert cluster.running(state) == head
    members = head.processes()
    assert len(members) == 2
    cluster.stop(head, state)
    assert all(member.status() == psutil.STATUS_ZOMBIE for member in members)
    assert sorted(path.name for path in state.parent.iterdir()) == ["lock", "logs"]
    assert (state.parent / "logs" / "gcs_server.out").read_text() == "it was me"
    assert not Path(head.folder).exists()


def test_the_state_of_another_head_stays(head: cluster.Cluster, state: Path) -> None:
    record = head_record.read(state)
    assert record
    head_record.write(state, record.model_copy(update={"secret": "0" * 64}))
    cluster.stop(head, state)
    assert state.exists()
    assert Path(head.token).exists()


def test_what_a_killed_head_left_is_known_and_can_be_stopped(head: cluster.Cluster, state: Path) -> None:
    killed = psutil.Process(head.pid)
    killed.kill()
    while killed.status() != psutil.STATUS_ZOMBIE:  # nothing waits for it
        time.sleep(0.01)
    assert cluster.running(state) is None
    assert cluster.last(state) == head
    assert [process.pid for process in head.processes() if process != killed] != []
    cluster.stop(head, state)
    assert [process for process in head.processes() if process.status() != psutil.STATUS_ZOMBIE] == []
    assert cluster.last(state) is None


def test_a_start_that_does_not_end_is_an_error(
    head: cluster.Cluster, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LOCK_S", 0.3)
    with held(state.with_name("lock"), 1):
        with pytest.raises(cluster.ClusterError, match="a `quartet up` in this folder does not end"):
            cluster.stop(head, state)
        with pytest.raises(cluster.ClusterError, match="another `quartet up` in this folder does not end"):
            cluster.start(print, state, timeout_s=0.3)


def test_a_process_joins_with_the_token_of_the_folder_unless_another_cluster_is_meant(
    head: cluster.Cluster, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in head.environment:
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another's")
    monkeypatch.setenv("RAY_ADDRESS", "ray-head.example:6379")
    cluster.join(state)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == "before"
    monkeypatch.delenv("RAY_ADDRESS")
    cluster.join(state)
    assert {name: os.environ[name] for name in head.environment} == head.environment
    assert "RAY_AUTH_TOKEN" not in os.environ
