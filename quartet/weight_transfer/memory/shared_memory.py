"""Memory that the processes of one machine share, named by a number."""

import errno
import glob
import mmap
import os
import secrets
import warnings
import weakref
from pathlib import Path

import torch

FOLDER = Path("/dev/shm")
_PREFIX = "quartet-"
_HEADER = 64
"""Bytes before the data; the first eight are the generation."""


class Segment:
    """Memory that one process writes and others read in place.

    The generation is a sequence lock: the writer raises it before and after it writes, so that it is odd meanwhile. A
    reader that finds the same even generation before and after reading has read one consistent state. For example a
    reader that finds 4 and afterwards 6 has read a mixture of two pushes.

    The segment disappears with its writer's process, however that ends; attached readers keep their view.
    """

    def __init__(self, number: int, memory: mmap.mmap, file: int | None) -> None:
        """Wraps mapped memory; use `create` or `attach`."""
        self.number = number
        self._close = weakref.finalize(self, os.close, file) if file is not None else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # a reader only reads
            whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._generation = whole[:8].view(torch.int64)
        self.data = whole[_HEADER:]
        """The bytes: uint8, [bytes]."""

    @classmethod
    def create(cls, size: int) -> "Segment":
        """A new segment of `size` bytes, for this process to write.

        Raises:
            RuntimeError: shared memory has too little room, or this machine has none.
        """
        number, file = secrets.randbelow(2**31 - 1) + 1, None
        try:
            file = os.open(_path(number), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # Unlinked at once: a file without a name disappears with the processes that use it, however they end.
            _path(number).unlink()
            # Reserves the memory now: a lack of room is an error here, but a signal at the first write.
            os.posix_fallocate(file, 0, _HEADER + size)
        except OSError as error:
            if file is not None:
                os.close(file)
            raise RuntimeError(
                f"{FOLDER} has no room for {size >> 20} MiB of weights ({error.strerror}); enlarge it"
            ) from None
        return cls(number, mmap.mmap(file, _HEADER + size), file)

    @classmethod
    def attach(cls, number: int, size: int) -> "Segment":
        """Another process's segment, to read: writing to it ends this process.

        Raises:
            RuntimeError: no segment on this machine has this number and size.
        """
        try:
            file = open_unnamed(str(_path(number)), os.O_RDONLY)
        except OSError as error:
            raise RuntimeError(f"no such shared memory here ({error.strerror})") from None
        try:
            shared = os.fstat(file).st_size - _HEADER
            if shared != size:
                raise RuntimeError(f"{shared} bytes are shared where {size} are to be pushed")
            # The writer's own memory, and not a private view of it, which CUDA would have to copy to pin it.
            return cls(number, mmap.mmap(file, _HEADER + size, access=mmap.ACCESS_READ), None)
        finally:
            os.close(file)

    @property
    def generation(self) -> int:
        """The number of begins and ends of writing: odd while the writer writes."""
        return int(self._generation.item())

    def begin(self) -> None:
        """Called by the writer before it changes the data."""
        self._generation += 1 + self.generation % 2

    def end(self) -> None:
        """Called by the writer when the data is complete again."""
        self._generation += 1

    def close(self) -> None:
        """Called by the writer, or when it drops this object; the memory is freed when the last reader leaves."""
        if self._close is not None:
            self._close()


def _path(number: int) -> Path:
    return FOLDER / f"{_PREFIX}{number:d}"


def open_unnamed(path: str, flags: int) -> int:
    """Opens a file without a name, which had this path, through a descriptor of a process that has it; only the same
    user can do so. FileNotFoundError if no process has it."""
    wanted = f"{path} (deleted)"
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) == wanted:
                return os.open(link, flags | os.O_CLOEXEC)
        except OSError:
            continue  # its process closed it just now, or is another user's
    raise FileNotFoundError(errno.ENOENT, "no process has it")
