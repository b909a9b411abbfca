"""Faults of a process that writes files: it is killed, or finds the disk full."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAKES, OTHER = b"m", b"."
"""Letters for events: the one makes or writes something, any other reads, renames or removes."""
PAGE = 4096
ROOM = 64 << 20
"""Bytes that a disk has after it has grown."""


def _can_mount() -> bool:
    """Mounting takes root, and CAP_SYS_ADMIN in a container."""
    if os.geteuid() or not shutil.which("mount"):
        return False
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    return bool(int(effective.split()[1], 16) & 1 << 21)


WITHIN = "full disk" if _can_mount() else "full within a file"
"""Fault at a random byte: of a disk as small as that where one can be mounted, else of the largest file."""


def sizes(folder: Path) -> list[int]:
    """Bytes that each file below takes on a disk."""
    return [-(-file.stat().st_size // PAGE) * PAGE for file in folder.rglob("*") if file.is_file()]


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[], None]]:
    """A disk of so many bytes at `folder`, which the kernel finds full (ENOSPC); what makes it larger."""
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield lambda: _run("mount", "-o", f"remount,size={ROOM}", str(folder))
    finally:
        _run("umount", str(folder))
        folder.rmdir()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def record(folder: Path, pipe: int) -> None:
    """Writes a letter for each event to a pipe."""

    def write(makes: bool, path: str) -> None:
        os.write(pipe, MAKES if makes else OTHER)

    _watch(folder, write)


def kill(folder: Path, at: int) -> None:
    """Ends this process at the event with this number."""
    seen: list[str] = []

    def happens(makes: bool, path: str) -> None:
        seen.append(path)
        if len(seen) > at:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(folder, happens)


def fill(folder: Path, at: int) -> None:
    """Lets nothing be made or written from the event with this number among those that do so; removing and renaming
    still work."""
    made: list[str] = []

    def happens(makes: bool, path: str) -> None:
        if not makes:
            return
        made.append(path)
        if len(made) > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    _watch(folder, happens)


def limit_files(size: int) -> None:
    """No file may become longer than this: what writes on is refused in the middle."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _watch(folder: Path, happens: Callable[[bool, str], None]) -> None:
    """Calls `happens` before each thing that Python does to a file or folder below `folder`.

    Its arguments are whether that makes or writes something, and the path.
    """
    inside = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        paths = [argument for argument in arguments if isinstance(argument, str | os.PathLike)]
        if event.startswith(("open", "os.", "shutil.")) and any(inside in str(path) for path in paths):
            mode = str(arguments[1]) if event == "open" else ""
            flags = arguments[2] if event == "open" else 0
            writes = any(letter in mode for letter in "wax+") or bool(flags & (os.O_CREAT | os.O_WRONLY))
            happens(event == "os.mkdir" or writes, str(paths[0]))

    sys.addaudithook(hook)
