"""A head whose own processes were too slow for Ray is started again; the program `ray start` is a fake one."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.deployment import cluster
from orchestrator.deployment.head import launch
from tests.unit.fake_clock import Clock

pytestmark = pytest.mark.processes

FAKE = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

starts = Path("starts")
count = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(count))
if count <= int(Path("failures").read_text()):
    sys.exit(Path("message").read_text())

class Dashboard(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"applications": {}}')

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--dashboard-port") + 1])), Dashboard).serve_forever()
"""
SLOW = "Exception: The current node timed out during startup. This could happen because of anything."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder. Its modules are not taken for those of Ray, of which PYTHONPATH has the fake."""
    program = tmp_path / "given" / "ray" / "scripts" / "scripts.py"
    program.parent.mkdir(parents=True)
    program.write_text(FAKE)
    for package in (program.parent, program.parent.parent):
        (package / "__init__.py").touch()
    (tmp_path / "ray.py").write_text("raise SystemExit('the module of the working folder')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "given"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fails(folder: Path, times: int, message: str) -> None:
    (folder / "failures").write_text(str(times))
    (folder / "message").write_text(message)


def test_a_head_that_ray_gave_up_on_is_started_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard is asked with the head's secret, which no proxy of the environment is to see."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    fails(folder, 2, SLOW)
    said: list[str] = []
    variables = {"QUARTET_POLICY": "of the file"}
    head = cluster.start(said.append, variables=variables)
    try:
        cluster.check_environment(head, variables)
        assert (folder / "starts").read_text() == "3"
        assert [line.partition(" at ")[0] for line in said[::2]] == ["starting a Ray head"] * 3
        assert said[1] == said[3]
        assert said[1].startswith("Ray gave its own processes 30 s to start")
        assert cluster.running() == head
    finally:
        cluster.stop(head)
    assert not psutil.pid_exists(head.pid) or psutil.Process(head.pid).status() == psutil.STATUS_ZOMBIE


def test_it_is_given_up_when_the_time_is_over(folder: Path) -> None:
    fails(folder, 99, SLOW)
    clock = Clock()

    def say(line: str) -> None:
        clock.now += 100 * line.startswith("starting a Ray head")

    # The last head, for which no time is left, may be ended before it has said why it is slow.
    with pytest.raises(
        cluster.ClusterError, match=r"^Ray (ended with status 1:\n.*timed out|was not ready within \d+ s:)"
    ):
        cluster.start(say, timeout_s=180, clock=clock)
    assert clock.now == 200
    assert cluster.last() is None


def test_any_other_end_is_told_at_once(folder: Path) -> None:
    fails(folder, 1, "no such option")
    with pytest.raises(cluster.ClusterError, match=r"Ray ended with status 1:\nno such option"):
        cluster.start(print)
    assert (folder / "starts").read_text() == "1"


def test_a_head_whose_start_is_interrupted_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C and kills come before its process has been noted, too."""
    fails(folder, 0, "")
    launched = []

    def interrupted(*arguments: Any) -> Any:
        launched.append(launch(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.start(print)
    left = cluster.last()
    assert left is not None
    assert (left.alive, [process.pid for process in left.processes()]) == (False, [launched[0].pid])
    cluster.stop(left)
    assert launched[0].wait(60) != 0
    assert cluster.last() is None
    assert not Path(left.folder).exists()
