"""A lock file that one process at a time holds."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_EVERY_S = 0.2


@contextmanager
def held(path: Path, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Context that holds the lock. The lock ends with its process, however that ends.

    Args:
        path: the file, made if it does not exist.
        timeout_s: the longest wait in seconds.
        waiting: called once if another process holds the lock.

    Raises:
        TimeoutError: another process still holds it.
    """
    end, told = time.monotonic() + timeout_s, False
    with path.open("w") as file:
        while not _taken(file.fileno()):
            if time.monotonic() >= end:
                raise TimeoutError(f"{path} was still held by another process after {timeout_s:g} s")
            if not told:
                waiting()
            told = True
            time.sleep(_LOOK_EVERY_S)
        yield


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
