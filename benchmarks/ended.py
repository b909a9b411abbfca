"""Runs a command for a limited time: one that hangs must not take the time of those after it."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def ended(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """The finished command, with what it printed.

    Raises:
        RuntimeError: it was not done in time, and was killed with all processes of its session.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise RuntimeError(f"{' '.join(command[:3])} was not done after {timeout_s:g} s, and was killed") from None
    return subprocess.CompletedProcess(command, process.returncode, printed, errors)
