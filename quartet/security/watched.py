"""Files that are read again when they change, so that a port's keys and policy can be replaced without a restart."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from quartet.config.base import ConfigError

Value = TypeVar("Value")
LOOK_EVERY_S = 1.0
log = logging.getLogger("quartet")


class Watched(Generic[Value]):
    """A value read from files, and read again when they change.

    If the new contents are wrong, the last good ones stay in force: a mistake while editing must neither lock all
    callers out nor let strangers in.
    """

    def __init__(
        self,
        read: Callable[[], Value],
        files: Callable[[], Sequence[str | Path]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            read: reads the value; raises ConfigError when it is wrong.
            files: returns the files that it is read from.
            clock: returns seconds.
        """
        self._read = read
        self._files = files
        self._clock = clock
        self._value = read()
        self._seen = self._state()
        self._looked = clock()

    def __call__(self) -> Value:
        """The value, at most a second old."""
        if self._clock() - self._looked >= LOOK_EVERY_S:
            self._looked = self._clock()
            seen = self._state()
            if seen != self._seen:
                # Recorded before reading, so that a change during the reading is noticed at the next look.
                self._seen = seen
                self._reread()
        return self._value

    def _reread(self) -> None:
        try:
            self._value = self._read()
        except (ConfigError, OSError) as error:
            log.error("the new contents are refused, the last valid ones stay in force: %s", error)
            return
        log.info("read again: %s", ", ".join(str(file) for file in self._files()))

    def _state(self) -> list[tuple[str, tuple[int, int, int] | None]]:
        return [(str(file), _signature(Path(file))) for file in self._files()]


def _signature(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
