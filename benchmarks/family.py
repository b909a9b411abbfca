"""All processes that one side of a benchmark has started, which stand still while the other has its turn."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

MARK = "QUARTET_BENCHMARK_SIDE"


class Family:
    """The processes that have a mark in their environment, and their descendants, whose titles replace the mark."""

    def __init__(self, name: str) -> None:
        """`name` is the mark's value, and another for each side."""
        self.environment = {MARK: name}
        """Environment variables of the first processes of the side."""
        self._name = name
        self._stopped: list[psutil.Process] = []

    def stop(self) -> None:
        """Stops all of them."""
        self._stopped = self._members()
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets those go on that were stopped."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops all of them in the meantime."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def _members(self) -> list[psutil.Process]:
        members: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid not in members and process.environ().get(MARK) == self._name:
                    members |= {member.pid: member for member in (process, *process.children(recursive=True))}
        return list(members.values())

    def _signal(self, number: signal.Signals) -> None:
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
