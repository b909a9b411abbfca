"""`quartet` commands that are forks of a process which has imported torch and transformers, as this takes seconds.

The command line itself is tried by tests that call `tests.cluster.command`.
"""

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forked import FORKED

PATIENCE_S = 300
"""Longest time, in seconds, that a command of the tests may take."""


class Command:
    """A command that runs, with the methods of subprocess.Popen that tests use."""

    def __init__(self, folder: Path, log: Path, *arguments: str, **environment: str) -> None:
        """Starts it in `folder`; what it prints is appended to `log`."""
        whole = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment
        self._process: Any = FORKED.Process(target=_main, args=(arguments, folder, log, whole))
        self._process.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        pid: int = self._process.pid
        return pid

    def poll(self) -> int | None:
        """The exit code; None while the command runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end and returns the exit code. TimeoutError after `timeout_s` seconds."""
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"still runs after {timeout_s} s")
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def finished(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that has been carried out in `folder`."""
    log = folder / "command.log"
    log.unlink(missing_ok=True)
    code = Command(folder, log, *arguments).wait(PATIENCE_S)
    return code, log.read_text()


def _main(arguments: Sequence[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
    """Does in the fork what the command line does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with log.open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["quartet", *arguments]
    # Imported here, as it asks for the terminal's width.
    from orchestrator.cli import main

    try:
        main()
    finally:
        # A fork of multiprocessing leaves these out, and Ray says goodbye to its cluster in one of them.
        atexit._run_exitfuncs()
