"""Starts processes that carry a head's mark, and returns once others can read it."""

import os
import subprocess
import time

import psutil

from orchestrator.deployment.processes import MARK


def start_marked(mark: str, *, user: int | None = None, **variables: str) -> "subprocess.Popen[bytes]":
    """A process that sleeps, with the mark and these variables in its environment.

    For a moment after a process has begun its program, Linux shows an empty environment; a test that looked then
    would find no mark.
    """
    environment = os.environ | {MARK: mark} | variables
    process = subprocess.Popen(["sleep", "600"], env=environment, user=user)
    deadline = time.monotonic() + 60
    while psutil.Process(process.pid).environ().get(MARK) != mark:
        assert time.monotonic() < deadline, "the process shows no environment"
        time.sleep(0.001)
    return process
