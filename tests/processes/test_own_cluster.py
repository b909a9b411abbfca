"""docs/security.md, its commands for a Ray cluster of the user's own, given one by one until a run has trained."""

import re
import shutil
import signal
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
from tests.shell import Shell

PAGE = (REPO / "docs" / "security.md").read_text().partition("## A Ray cluster of your own")[2]
COMMANDS = re.findall(r"^\$ (.+?)(?:  +#.*)?$", PAGE.partition("```console")[2].partition("```")[0], re.MULTILINE)
STEPS = 2


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell whose Ray listens on loopback only, at ports that are free here."""
    temporary = tempfile.mkdtemp(prefix="qo-", dir="/tmp")  # Ray's sockets allow only short paths
    mark = uuid.uuid4().hex
    gcs, dashboard, client = free_ports(3)
    exchanged = {
        "ray start --head": f"ray start --head --port {gcs} --dashboard-port {dashboard} "
        f"--ray-client-server-port {client} --node-ip-address 127.0.0.1 --num-cpus 8 "
        "--min-worker-port 0 --max-worker-port 0",
        "RAY_ADDRESS=auto": f"RAY_ADDRESS=127.0.0.1:{gcs}",
        "deploy/ppo.yaml": "ppo.yaml",
    }
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    try:
        yield Shell(tmp_path, {"RAY_TMPDIR": temporary, MARK: mark} | own, exchanged)
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
