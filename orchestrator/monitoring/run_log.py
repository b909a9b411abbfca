"""The log of a run, runs/<name>/run.log: what the user is told besides the steps, and what else happened to it."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import RawIOBase
from pathlib import Path
from typing import Self

from orchestrator.monitoring.metrics import RUN_LOG
from orchestrator.monitoring.progress import Progress
from orchestrator.monitoring.terminal import printable
from quartet.wire.errors import reasons


def _now() -> datetime:
    return datetime.now(UTC)


class RunLog:
    """A progress display that also keeps its notes, Quartet's own log records and the error that ends the run.

    They are held until the run has its folder. A file that cannot be written ends no run.
    """

    def __init__(self, shown: Progress, clock: Callable[[], datetime]) -> None:
        self._shown, self._clock = shown, clock
        self._held: list[str] = []
        self._file: RawIOBase | None = None
        self._lock = threading.Lock()
        """Records come from other threads too."""
        self.start, self.before_training, self.step = shown.start, shown.before_training, shown.step
        self.pause, self.stop = shown.pause, shown.stop

    @classmethod
    @contextmanager
    def of(cls, shown: Progress, clock: Callable[[], datetime] = _now) -> Iterator[Self]:
        """Context of a run: keeps what happens until its end, and how it ended.

        Args:
            shown: the display.
            clock: returns the time that each line begins with, in UTC.
        """
        log, logger = cls(shown, clock), logging.getLogger("quartet")
        before = logger.level
        logger.addFilter(log._record)
        logger.setLevel(logging.INFO)
        try:
            yield log
        except (asyncio.CancelledError, KeyboardInterrupt):
            log._write("interrupted, by Ctrl-C, SIGTERM or the script that runs it")
            raise
        except Exception as error:
            log._write(f"ended by an error: {reasons(error)}")
            raise
        else:
            log._write("finished")
        finally:
            logger.setLevel(before)
            logger.removeFilter(log._record)
            if log._file is not None:
                log._file.close()

    def keep_in(self, run_dir: Path) -> None:
        """Writes what was held, and from now on every line, to the run's folder."""
        with self._lock:
            if self._file is not None:
                return
            try:
                self._file = (run_dir / RUN_LOG).open("ab", buffering=0)
            except OSError as error:
                self._shown.note(f"{run_dir / RUN_LOG} cannot be written: {error.strerror}")
                return
            self._put(self._file, self._held)

    def note(self, text: str) -> None:
        """Shows and keeps a message."""
        self._shown.note(text)
        self._write(text)

    def _record(self, record: logging.LogRecord) -> bool:
        """A filter that keeps each record, and passes on those that are warnings."""
        self._write(record.getMessage())
        return record.levelno >= logging.WARNING

    def _write(self, text: str) -> None:
        line = f"{self._clock():%Y-%m-%d %H:%M:%S}  {printable(text)}\n"
        with self._lock:
            if self._file is None:
                self._held.append(line)
            else:
                self._put(self._file, [line])

    @staticmethod
    def _put(file: RawIOBase, lines: Sequence[str]) -> None:
        # The metrics end a run whose disk is full; what tells of a checkpoint that failed for that does not.
        with contextlib.suppress(OSError):
            file.write("".join(lines).encode())
