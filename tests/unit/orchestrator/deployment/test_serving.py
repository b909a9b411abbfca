"""Waiting for applications: a dashboard that is busy is asked again, one whose head has ended is not."""

import itertools
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.deployment.cluster import Cluster, ClusterError, serve
from orchestrator.deployment.processes import MARK, uptime_at_start
from orchestrator.deployment.redeployment import fixed
from orchestrator.deployment.serving import await_running, deploy
from tests.unit.marked import start_marked

SLOW = {"status": "UPDATING", "message": "Deployment 'Reward' has 1 replicas that have taken more than 30s to start."}
RUNNING, STARTING = ({"applications": {"reward": {"status": status}}} for status in ("RUNNING", "DEPLOYING"))
FAILED = {"applications": {"reward": {"status": "DEPLOY_FAILED", "message": "no such model"}}}
SECRET = secrets.token_hex(32)
Heads = Callable[..., Cluster]
put: list[dict[str, Any]] = []
"""Files that were deployed on the head of the present test."""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Heads]:
    """Makes a head whose dashboard gives these answers in turn, the last again and again; a number is an error, and
    bytes are sent as they are."""
    servers: list[HTTPServer] = []
    processes: list[subprocess.Popen[bytes]] = []
    put.clear()
    token = tmp_path / "token"
    token.write_text("secret")

    def make(*answers: dict[str, object] | int | bytes, alive: bool = True) -> Cluster:
        waiting = list(answers)

        class Dashboard(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                if isinstance(answer, bytes):
                    self.wfile.write(answer)
                    return
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def do_PUT(self) -> None:
                put.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Dashboard)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = start_marked(SECRET)
        processes.append(process)
        return Cluster(
            pid=process.pid,
            created=uptime_at_start(psutil.Process(process.pid)) if alive else 0.0,
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


def test_serve_gets_its_own_sections_with_numbers_that_can_scale(head: Heads, tmp_path: Path) -> None:
    reward = {"name": "reward", "import_path": "services.reward.replica:build"}
    numbered = reward | {"deployments": [{"name": "Reward", "num_replicas": 2}]}
    file = tmp_path / "a.yaml"
    file.write_text(
        json.dumps({"http_options": {"port": 1}, "orchestrator": {"secret": 1}, "applications": [numbered]})
    )
    deploy(head({}), file)
    bounded = reward | {"deployments": [{"name": "Reward", **fixed(2)}]}
    assert put == [{"http_options": {"port": 1}, "applications": [bounded]}]


@pytest.mark.parametrize(
    ("answer", "message"), [(400, r"^Serve refused .*a\.yaml:\n400$"), (503, r"^Serve refused .*a\.yaml:\n503$")]
)
def test_a_file_that_serve_refuses_is_told_with_its_reason(
    head: Heads, answer: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("applications: []")
    with pytest.raises(ClusterError, match=message):
        deploy(head(answer), file)


DIED = b"""HTTP/1.0 500 Internal Server Error\r\n\r\nTraceback (most recent call last):
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: ProxyActor
The actor is dead because it was killed by `ray.kill`.
The actor never ran - it was cancelled before it started running.
"""
LATE = b"HTTP/1.0 500 Error\r\n\r\nTimeoutError: HTTP proxies not available after 60s.\n"


def test_a_file_is_given_again_while_serve_replaces_its_proxy(head: Heads, tmp_path: Path) -> None:
    file, said = tmp_path / "a.yaml", list[str]()
    file.write_text("applications: []")
    deploy(head(DIED, LATE, {}), file, say=said.append)
    assert put == [{"applications": []}] * 3
    assert said == ["Serve's proxy did not start in the time that Serve gives it, and is started again"]
    with pytest.raises(ClusterError, match=r"^Serve refused .*a\.yaml:\n400$"):
        deploy(head(DIED, 400), file)
    seconds = itertools.count(0.0, 20.0)
    with pytest.raises(ClusterError, match=r"^Serve did not take .*a\.yaml within 100 s:\n(.|\n)*by `ray.kill`"):
        deploy(head(DIED), file, timeout_s=100, clock=lambda: next(seconds))


def test_a_dashboard_that_is_gone_takes_no_file(head: Heads, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("applications: []")
    gone = replace(head({}), dashboard="http://127.0.0.1:1")
    with pytest.raises(ClusterError, match=r"^Serve did not take .*a\.yaml within 300 s: .*refused"):
        deploy(gone, file)


def test_a_busy_dashboard_is_asked_again(head: Heads) -> None:
    said: list[str] = []
    await_running(head(503, STARTING, 504, RUNNING), ("reward",), said.append, 60)
    assert said == [
        "waiting for Ray's dashboard (HTTP Error 503: Service Unavailable)",
        "waiting for reward (starting)",
        "waiting for Ray's dashboard (HTTP Error 504: Gateway Timeout)",
    ]


def test_an_ended_head_is_told_at_once(head: Heads) -> None:
    with pytest.raises(ClusterError, match=r"^the Ray head at 127\.0\.0\.1:6379 has ended$"):
        await_running(head(503, alive=False), ("reward",), print, 600)


def test_a_failed_application_is_told_at_once_and_a_slow_one_at_the_deadline(head: Heads) -> None:
    with pytest.raises(ClusterError, match=r"^reward: .*no such model"):
        await_running(head(FAILED), ("reward",), print, 600)
    with pytest.raises(
        ClusterError, match=r"^not running after 0 s: reward \(starting\); the services' logs are in /"
    ):
        await_running(head(STARTING), ("reward",), print, 0)


def test_a_user_who_waits_hears_every_10_s_what_serve_says(head: Heads) -> None:
    said: list[str] = []
    starting = {"applications": {"reward": {"status": "DEPLOYING", "deployments": {"Reward": SLOW}}}}
    seconds = itertools.count(0.0, 4.0)  # at the first look it is 4 s
    await_running(head(*[starting] * 8, RUNNING), ("reward",), said.append, 60, clock=lambda: next(seconds))
    state = f"waiting for reward (starting: {SLOW['message']})"
    assert said == [state, f"{state}, 16 s so far", f"{state}, 28 s so far"]


OK = b"HTTP/1.0 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OK + b"\r\n<html>a proxy's page</html>", r"answers b\"<html>a proxy's page</html>\", which is not"),
        (OK + b"\r\n" + b"[" * 100_000, "which is not a description of Serve's"),
        (OK + b"\r\n{}", r"answers b'\{\}', which is not a description of Serve's"),
        (OK + b"Content-Length: 9\r\n\r\n{}", "does not answer in HTTP: IncompleteRead"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer in HTTP: BadStatusLine"),
    ],
    ids=["page", "deep", "other JSON", "cut off", "another protocol"],
)
def test_an_answer_that_is_not_serves_is_a_dashboard_that_does_not_answer(
    head: Heads, answer: bytes, said: str
) -> None:
    cluster = head(answer)
    with pytest.raises(OSError, match=f"^{cluster.dashboard} .*{said}"):
        serve(cluster)
    with pytest.raises(ClusterError, match=f"^not running after 1 s: Ray's dashboard .*{said}"):
        await_running(cluster, ("reward",), lambda line: None, 1)
    cluster = head(answer, RUNNING)  # a head that begins to answer is well
    await_running(cluster, ("reward",), lambda line: None, 60)


def test_a_replica_that_a_signal_has_stopped_while_it_starts_is_named(head: Heads) -> None:
    """Serve waits for its constructor without end."""
    cluster = head(STARTING)
    title = "ray::ServeReplica:reward:Reward"
    command = ["bash", "-c", f"exec -a {title} sleep 600"]
    with subprocess.Popen(command, env=os.environ | {MARK: SECRET}) as process:
        try:
            while psutil.Process(process.pid).cmdline()[:1] != [title]:
                time.sleep(0.01)
            process.send_signal(signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            said: list[str] = []
            clock = itertools.count(0, 6.0)
            with pytest.raises(ClusterError, match=f"a signal has stopped process {process.pid} of reward"):
                await_running(cluster, ("reward",), said.append, 30, lambda: float(next(clock)))
            assert said[1].endswith(
                f"; a signal has stopped process {process.pid} of reward, which Serve replaces after "
                f"`kill -9 {process.pid}`"
            )
        finally:
            process.kill()
