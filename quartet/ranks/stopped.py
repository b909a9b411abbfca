"""Processes that a signal has stopped, as SIGSTOP does, or that have ended.

A stopped process keeps its connections open and never answers. Silence alone does not tell it from one that loads a
model, or computes for minutes in a library that lets no other thread of Python run.
"""

from collections.abc import Iterable, Mapping

import psutil


def is_stopped(process: psutil.Process) -> bool:
    """True while a signal has stopped the process; False if it runs, waits, is traced by a debugger, or has ended."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def has_ended(process: psutil.Process) -> bool:
    """True once the process has ended, also while its parent has not collected it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def stopped_again(before: Mapping[psutil.Process, int], seen: Iterable[psutil.Process]) -> dict[psutil.Process, int]:
    """Finds which of the processes are stopped, and for how long: process -> looks in a row that found it so.

    `before` is the answer of the look before. Looks are counted and not seconds, since the process that looks may
    have been stopped meanwhile too.
    """
    return {process: before.get(process, 0) + 1 for process in seen if is_stopped(process)}
