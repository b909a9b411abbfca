"""Ctrl-C while the command line is still being imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.entry import main

pytestmark = pytest.mark.processes
INTERRUPTED = "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit('went on')\n"
"""A module that the command line imports, in which Ctrl-C is pressed."""


def started(folder: Path, handler: str) -> "subprocess.CompletedProcess[str]":
    """The command, with this handler of Ctrl-C at first, and with the modules of this folder before others."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[3])])
    handled = f"import signal; signal.signal(signal.SIGINT, signal.{handler})"
    return subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            f"{handled}; from orchestrator.entry import main; main()",
            "check",
            "absent.yaml",
        ],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(INTERRUPTED)
    done = started(tmp_path, "default_int_handler")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_command_in_the_background_of_a_script_goes_on(tmp_path: Path) -> None:
    """Shells let these ignore Ctrl-C, which is for what stands in front."""
    (tmp_path / "typer.py").write_text(INTERRUPTED)
    done = started(tmp_path, "SIG_IGN")
    assert (done.returncode, done.stderr) == (1, "went on\n")


def test_once_it_is_imported_commands_take_ctrl_c_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_by = []
    monkeypatch.setattr("orchestrator.cli.main", lambda: taken_by.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert taken_by == [signal.default_int_handler]
