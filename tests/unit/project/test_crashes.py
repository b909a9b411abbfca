"""The search of logs for crashes, and the run of tests that it fails."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crashes import crashes

REPO = Path(__file__).parents[3]
OF_RAY = "*** SIGSEGV received at time=1 on cpu 0 ***"
OF_PYTHON = "Fatal Python error: Segmentation fault"


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """A folder for crashes that are meant: they must be gone when this run of tests is searched itself."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_a_crash_is_found_in_any_log_and_nothing_else_is(planted: Path) -> None:
    folder = planted / "serve"
    folder.mkdir()
    (folder / "proxy.log").write_text("GET / 200\n")
    # What Ray says of a worker that was killed.
    (planted / "raylet.out").write_text("(3) The worker has crashed unexpectedly due to SIGSEGV or other errors.\n")
    assert crashes([planted]) == []
    (planted / "worker-1.err").write_bytes(f"\xff one\n{OF_RAY}\n".encode("latin-1"))
    (folder / "replica.log").write_text(f"{OF_PYTHON}\n")
    assert crashes([planted, folder]) == [
        f"{folder / 'replica.log'}:1: {OF_PYTHON}",
        f"{planted / 'worker-1.err'}:2: {OF_RAY}",
    ]


@pytest.mark.processes
@pytest.mark.parametrize(("died", "status"), [(True, 1), (False, 0)])
def test_a_run_of_tests_in_which_a_process_crashed_fails_though_every_test_passed(
    planted: Path, died: bool, status: int
) -> None:
    """A process with the handler that Ray's workers have dies of a real fault."""
    crash = "import faulthandler, ctypes; faulthandler.enable(); " + ("ctypes.string_at(0)" if died else "")
    (planted / "test_crash.py").write_text(
        "import subprocess, sys\n\n"
        "def test_that_passes(tmp_path):\n"
        "    with open(tmp_path / 'worker.err', 'w') as log:\n"
        f"        subprocess.run([sys.executable, '-c', {crash!r}], stderr=log)\n"
    )
    where = ("--basetemp", str(planted / "base"), "--rootdir", str(planted), "-c", os.devnull)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.crashes", *where, str(planted)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == status
    assert ("worker.err:1: Fatal Python error: Segmentation fault" in done.stdout) is died
