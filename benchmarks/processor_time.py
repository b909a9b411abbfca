"""Processor time of a head's processes and of a run, by kind of process: it says the same on a busy machine as on a
quiet one."""

import re
from collections.abc import Iterable

import psutil

_TITLES = {
    "quartet train": re.compile(r"\bquartet train\b"),
    "learner's ranks": re.compile(r"process_rank|^ray::\w*Rank"),
    "Serve's proxy": re.compile(r"^ray::ProxyActor"),
    "replicas": re.compile(r"^ray::ServeReplica"),
    "vLLM's engine": re.compile(r"^VLLM::"),
}
"""Kind of a process -> its command line or title."""
OTHERS = "Ray's own"
KINDS = (*_TITLES, OTHERS)


def kind(title: str) -> str:
    """The kind of a process, one of KINDS, from its command line or title."""
    return next((name for name, pattern in _TITLES.items() if pattern.search(title)), OTHERS)


class Meter:
    """Reads the processor time of processes, and remembers each one's kind and last reading."""

    def __init__(self) -> None:
        self._kinds: dict[psutil.Process, str] = {}
        self._seconds: dict[psutil.Process, float] = {}

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Adds processes, whose time counts from their own beginning."""
        for process in processes:
            try:
                self._kinds[process] = kind(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue

    def read(self) -> dict[str, float]:
        """Seconds of user and system time so far, for each of KINDS; of an ended process, as read last."""
        total = dict.fromkeys(KINDS, 0.0)
        for process, name in self._kinds.items():
            try:
                times = process.cpu_times()
                self._seconds[process] = times.user + times.system
            except psutil.NoSuchProcess:
                pass
            total[name] += self._seconds.get(process, 0.0)
        return total
