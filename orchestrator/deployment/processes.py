"""Finds the processes of a Ray head by an inherited mark, and ends them and nothing else."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

MARK = "QUARTET_HEAD"
"""The environment variable with the head's secret, which every process of a head inherits, even one that has left the
head's process tree."""
_TERMINATED_DAEMONS = ("raylet", "gcs_server")
"""Daemons of Ray that shut down in order on SIGTERM."""
_TRACKER = "multiprocessing.resource_tracker"
_LOOK_EVERY_S = 0.1
UPTIME_PRECISION_S = 3.0
"""Two readings of `uptime_at_start` for one process differ by less, in seconds: each is the difference of two times
that follow the clock in whole seconds, which may turn between them."""
GRACE_S = 2.0
"""Seconds that workers get to end by themselves after the daemons have ended."""


def family(mark: str) -> list[psutil.Process]:
    """This user's processes with this mark, and their descendants, since workers overwrite the mark with their
    titles."""
    members: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid not in members and inherited(process, mark):
            members |= {member.pid: member for member in (process, *(_told(process.children, recursive=True) or ()))}
    return list(members.values())


def uptime_at_start(process: psutil.Process) -> float:
    """Seconds from the machine's start to that of the process. Unlike the time of day it stays the same when the
    clock is set, and a machine that slept gets its clock set."""
    return float(process.create_time() - psutil.boot_time())


def end(members: Sequence[psutil.Process], patience_s: float) -> None:
    """Ends the processes; returns when all have ended or time is up."""
    daemons = [process for process in members if _is_daemon(process)]
    for process in daemons:
        _told(process.terminate)
    _alive_after(daemons, patience_s)
    # Workers end by themselves then; one that does not holds nothing but memory, such as a model.
    trackers = [process for process in members if _TRACKER in " ".join(_told(process.cmdline) or ())]
    for process in _alive_after([member for member in members if member not in trackers], min(GRACE_S, patience_s)):
        _told(process.kill)
    # Resource trackers remove the semaphores and shared memory of their processes once the last of those has ended.
    for process in _alive_after(members, patience_s):
        _told(process.kill)
    _alive_after(members, patience_s)


def stopped(members: Sequence[psutil.Process]) -> dict[int, str]:
    """Process id -> title of the processes that a signal has stopped."""
    halted = [process for process in members if _told(process.status) == psutil.STATUS_STOPPED]
    return {process.pid: " ".join(_told(process.cmdline) or ()) for process in halted}


def _is_daemon(process: psutil.Process) -> bool:
    """True if it shuts down in order on SIGTERM."""
    return _told(process.name) in _TERMINATED_DAEMONS or "ray.scripts.scripts" in (_told(process.cmdline) or ())


def inherited(process: psutil.Process, mark: str) -> bool:
    """True if this user's process has the mark."""
    try:
        return process.uids().real == os.getuid() and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _alive_after(members: Sequence[psutil.Process], patience_s: float) -> list[psutil.Process]:
    """Waits up to `patience_s`; returns the processes that still run. A zombie counts as ended."""
    end = time.monotonic() + patience_s
    while alive := [process for process in members if _runs(process)]:
        if time.monotonic() > end:
            break
        time.sleep(_LOOK_EVERY_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and _told(process.status) not in (psutil.STATUS_ZOMBIE, None)


def _told(ask: Callable[..., Any], **options: Any) -> Any:
    """The answer of a process, or None if it has just ended or does not answer this user, as a child with setuid."""
    try:
        return ask(**options)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
