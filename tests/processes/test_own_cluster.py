"""docs/security.md, its commands for a Ray cluster of the user's own, given one by one until a run has trained."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.deployment.listeners import free_ports
from orchestrator.monitoring.metrics import read_metrics
from tests.cluster import MARK, inherited
from tests.configuration import REPO, configuration, write_prompts

PAGE = (REPO / "docs" / "security.md").read_text().partition("## A Ray cluster of your own")[2]
COMMANDS = re.findall(r"^\$ (.+?)(?:  +#.*)?$", PAGE.partition("```console")[2].partition("```")[0], re.MULTILINE)
STEPS = 2


class Shell:
    """One shell of a user's: what is exported stays for the next command. Ports are those that are free here."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        """Chooses the ports of the cluster."""
        self._folder = folder
        gcs, dashboard, client = free_ports(3)
        self._exchanged = {
            "ray start --head": f"ray start --head --port {gcs} --dashboard-port {dashboard} "
            f"--ray-client-server-port {client} --node-ip-address 127.0.0.1 --num-cpus 8 "
            "--min-worker-port 0 --max-worker-port 0",
            "RAY_ADDRESS=auto": f"RAY_ADDRESS=127.0.0.1:{gcs}",
            "deploy/ppo.yaml": "ppo.yaml",
        }
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # Without what the tests give to clusters of `quartet up`, except that Ray listens on loopback only. In a home
        # of its own: Ray keeps its token there.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "QUARTET_"))}
        own |= {"HOME": str(folder), "PATH": paths, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        own |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        self._environment = own | variables

    def run(self, line: str) -> str:
        """Text that the command printed, which has to succeed."""
        for old, new in self._exchanged.items():
            line = line.replace(old, new)
        done = subprocess.run(
            ["bash", "-c", f"{line} || exit; env -0 >environment"],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{line}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        found = (self._folder / "environment").read_text().split("\0")
        self._environment = dict(pair.split("=", 1) for pair in found if "=" in pair)
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    temporary = tempfile.mkdtemp(prefix="qo-", dir="/tmp")  # Ray's sockets allow only short paths
    mark = uuid.uuid4().hex
    try:
        yield Shell(tmp_path, {"RAY_TMPDIR": temporary, MARK: mark})
    finally:
        # By number, where a user calls `ray stop`, which would end the clusters of all tests.
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in inherited(mark):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            deadline = time.monotonic() + 20
            while inherited(mark) and time.monotonic() < deadline:
                time.sleep(0.2)
        shutil.rmtree(temporary, ignore_errors=True)
    assert inherited(mark) == []


@pytest.mark.exhaustive  # a cluster and a quartet of its own
def test_the_commands_of_the_page_lead_to_a_trained_policy(
    shell: Shell, tmp_path: Path, policy_folder: Path, reward_folder: Path
) -> None:
    http, grpc_port = free_ports(2)
    raw = configuration(policy_folder, reward_folder, write_prompts(tmp_path), http, grpc_port)
    raw["orchestrator"] |= {"steps": STEPS}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(raw))
    assert len(COMMANDS) == 7
    for line in COMMANDS:
        printed = shell.run(line)
        if line.startswith("serve status"):
            until = time.monotonic() + 300
            while printed.count("status: RUNNING") < 4 and time.monotonic() < until:
                time.sleep(3)
                printed = shell.run(line)
    rows = read_metrics(tmp_path / "runs" / "three-steps" / "metrics.jsonl")
    # The weights that a run begins with are pushed as version 1; row 0 is their evaluation.
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["policy/version"] for row in rows[1:]] == [step + 1 for step in range(1, STEPS + 1)]
