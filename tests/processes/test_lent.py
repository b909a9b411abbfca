"""The plan of a lent machine goes through on a CPU, by the command for a GPU, and survives being killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import read
from benchmarks.lent.ledger import NAME
from benchmarks.lent.stages import STAGES

ROOT = Path(__file__).parents[2]
SHORT = "machine;push ipc"
"""Torch in one process, and processes that push to one another."""

pytestmark = pytest.mark.exhaustive  # stages that hang, fail or are cut off, and what is kept of them, by units


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """The command of the plan, whose figures are in this folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.lent", "run", "--folder", str(folder), "--device", "cpu", *options]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kinds(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind."""
    return [record for record in read(folder / NAME) if record["kind"] == kind]


def killed_at_the_first_figure(folder: Path, *options: str) -> None:
    """Kills the command once it has a figure."""
    process = start(folder, *options)
    until = time.monotonic() + 200
    while not kinds(folder, "figure"):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def finished(folder: Path, *options: str, timeout_s: float) -> tuple[int, str]:
    """Exit status of the command, and what it printed."""
    process = start(folder, *options)
    printed, _ = process.communicate(timeout=timeout_s)
    return process.returncode, printed


def test_a_killed_command_loses_no_figure_and_the_next_goes_on(tmp_path: Path) -> None:
    killed_at_the_first_figure(tmp_path, "--only", SHORT)
    kept = kinds(tmp_path, "figure")
    assert kept[0]["what"] == "host"
    status, printed = finished(tmp_path, "--only", SHORT, timeout_s=400)
    assert status == 0, printed
    ended = [(record["stage"], record["outcome"]) for record in kinds(tmp_path, "ended")]
    assert ended == [("push ipc", "done"), ("machine", "done")]
    assert kinds(tmp_path, "figure")[: len(kept)] == kept
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.lent", "report", str(tmp_path / NAME)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "push ipc: done after" in told
    assert "ipc, 1 replica: bare_s" in told
    assert "engine 0.5B: not begun" in told


@pytest.mark.timeout(3600)
def test_all_stages_go_through_at_the_smallest_size(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # Imported here, as it imports torch, which the processes that divide the tests need not.
    from benchmarks.vs_trl.sides import make_environment

    peer = make_environment(tmp_path_factory.mktemp("trl"))
    options = ("--seconds", "3000", "--peer", str(peer))
    killed_at_the_first_figure(tmp_path, *options)
    status, printed = finished(tmp_path, *options, timeout_s=3300)
    assert status == 0, printed
    outcomes = {record["stage"]: record["outcome"] for record in kinds(tmp_path, "ended")}
    assert outcomes == {stage.name: "done" for stage in STAGES}
    gave = {record["stage"] for record in kinds(tmp_path, "figure") if "error" not in record}
    assert gave == set(outcomes)
