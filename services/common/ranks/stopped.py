"""Processes that a signal has stopped, as SIGSTOP does.

Such a process keeps its connections open and never answers. Silence alone does not tell it from one that loads a
model, or computes for minutes in a library that lets no other thread of Python run.
"""

import psutil


def is_stopped(process: psutil.Process) -> bool:
    """True while a signal has stopped the process; False if it runs, waits, is traced by a debugger, or has ended."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
