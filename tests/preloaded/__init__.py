"""Replicas of Serve, their engines, and learners, as forks of processes that have imported what takes them long.

Ray starts `launcher.py` in the place of Python; it asks `server.py` for a fork and hands it all that it was given.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

_HERE = Path(__file__).parent
_FOLDER = "QUARTET_TEST_PRELOADED"
"""The folder that holds the sockets for learners."""


def preload(application: dict[str, Any], folder: Path) -> None:
    """Makes what Ray starts for an application forks of one process, whose socket is in this folder."""
    kind = "rollout" if application["import_path"].startswith("services.rollout.") else "models"
    application["runtime_env"] = application.get("runtime_env", {}) | _environment(kind, folder)


def preload_learners(folder: Path) -> None:
    """Makes learners of runs that this process, or one that it starts, begins from now on such forks."""
    os.environ |= {_FOLDER: str(folder), "RAY_RUNTIME_ENV_HOOK": f"{__name__}.environment_of_a_run"}


def environment_of_a_run(environment: dict[str, Any] | None) -> dict[str, Any]:
    """Makes the runtime environment of all that a driver starts; Ray calls it there."""
    return (environment or {}) | _environment("models", Path(os.environ[_FOLDER]))


def _environment(kind: str, folder: Path) -> dict[str, str]:
    """Ray's runtime environment with such a program."""
    return {"py_executable": str(program(kind, folder))}


def program(kind: str, folder: Path) -> Path:
    """A program that takes Python's arguments, and is made if it is not there."""
    path = folder / f"{kind}-python"
    if not path.exists():
        # Without packages and variables, as it needs none, it starts in a hundredth of a second.
        launcher = f"'{sys.executable}' -SE '{_HERE / 'launcher.py'}' '{folder / kind}'"
        path.write_text(f'#!/bin/sh\nexec {launcher} "$@"\n')
        path.chmod(0o700)
    return path


def make_folder() -> Path:
    """A folder for the sockets of such processes, in that for Ray's, as its path is short enough."""
    return Path(tempfile.mkdtemp(prefix="pre-", dir=os.environ.get("RAY_TMPDIR")))


def all_of(process: psutil.Process) -> list[psutil.Process]:
    """The fork that a launcher waits for and the launcher, which stand for one process, or the process itself. A
    signal that stops the process has to reach each of them."""
    fork = fork_of(process)
    return [process] if fork == process else [fork, process]


def fork_of(process: psutil.Process) -> psutil.Process:
    """The fork that a launcher waits for; any other process itself."""
    name, _, pid = process.name().partition(" ")
    return psutil.Process(int(pid)) if name == "fork" else process
