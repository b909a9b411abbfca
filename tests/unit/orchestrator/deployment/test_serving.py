"""Waiting for applications: a dashboard that is busy is asked again, one whose head has ended is not."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from orchestrator.deployment.cluster import Cluster, ClusterError
from orchestrator.deployment.processes import MARK
from orchestrator.deployment.serving import await_running

RUNNING, STARTING = ({"applications": {"reward": {"status": status}}} for status in ("RUNNING", "DEPLOYING"))
FAILED = {"applications": {"reward": {"status": "DEPLOY_FAILED", "message": "no such model"}}}
SECRET = "5" * 64
Heads = Callable[..., Cluster]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Heads]:
    """Makes a head whose dashboard gives these answers in turn, the last again and again; a number is an error."""
    servers: list[HTTPServer] = []
    processes: list[subprocess.Popen[bytes]] = []
    token = tmp_path / "token"
    token.write_text("secret")

    def make(*answers: dict[str, object] | int, alive: bool = True) -> Cluster:
        waiting = list(answers)

        class Dashboard(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Dashboard)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: SECRET})
        processes.append(process)
        return Cluster(
            pid=process.pid,
            created=psutil.Process(process.pid).create_time() if alive else 0.0,
            address="127.0.0.1:6379",
            dashboard=f"http://127.0.0.1:{server.server_port}",
            token=str(token),
            folder=str(tmp_path / "of nothing"),
            secret=SECRET,
        )

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()
    for process in processes:
        process.kill()
        process.wait()


def test_a_busy_dashboard_is_asked_again(head: Heads) -> None:
    said: list[str] = []
    await_running(head(503, STARTING, 504, RUNNING), ("reward",), said.append, 60)
    assert said == [
        "waiting for Ray's dashboard (HTTP Error 503: Service Unavailable)",
        "waiting for reward (DEPLOYING)",
        "waiting for Ray's dashboard (HTTP Error 504: Gateway Timeout)",
    ]


def test_an_ended_head_is_told_at_once(head: Heads) -> None:
    with pytest.raises(ClusterError, match=r"^the Ray head at 127\.0\.0\.1:6379 has ended$"):
        await_running(head(503, alive=False), ("reward",), print, 600)


def test_a_failed_application_is_told_at_once_and_a_slow_one_at_the_deadline(head: Heads) -> None:
    with pytest.raises(ClusterError, match=r"^reward: .*no such model"):
        await_running(head(FAILED), ("reward",), print, 600)
    with pytest.raises(ClusterError, match=r"^not running after 0 s: reward \(DEPLOYING\)$"):
        await_running(head(STARTING), ("reward",), print, 0)
