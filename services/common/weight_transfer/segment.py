"""Memory that the processes of one machine share, with a number for its name."""

import fcntl
import mmap
import os
import secrets
from pathlib import Path

import torch

FOLDER = Path("/dev/shm")
_PREFIX = "quartet-"
_HEADER = 64
"""Bytes before the data; the first eight are the generation."""


class Segment:
    """Bytes that one process writes and others read in place.

    The writer raises the generation before and after it writes, so that it is odd meanwhile: a reader that finds the
    same even generation before and after reading has read one state (a sequence lock). The segment goes with its
    writer; what a killed one left, the next one on the machine removes.
    """

    def __init__(self, number: int, memory: mmap.mmap, file: int | None) -> None:
        """Use `create` or `attach`."""
        self.number = number
        self._file = file
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._generation = whole[:8].view(torch.int64)
        self.data = whole[_HEADER:]
        """uint8, [bytes]"""

    @classmethod
    def create(cls, size: int) -> "Segment":
        """A new segment of `size` bytes, for this process to write.

        Raises:
            RuntimeError: there is no room for it.
        """
        _remove_left()
        while True:
            number = secrets.randbelow(2**31 - 1) + 1
            file = os.open(_path(number), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            # Before it was locked, somebody who was tidying up may have taken it for left behind.
            if os.fstat(file).st_nlink:
                break
            os.close(file)
        try:
            # Now, as an error, and not at the first write, as a signal.
            os.posix_fallocate(file, 0, _HEADER + size)
        except OSError as error:
            _path(number).unlink()
            os.close(file)
            raise RuntimeError(
                f"{FOLDER} has no room for {size >> 20} MiB of weights ({error.strerror}); enlarge it, "
                "or set weight_backend to gloo"
            ) from None
        return cls(number, mmap.mmap(file, _HEADER + size), file)

    @classmethod
    def attach(cls, number: int, size: int) -> "Segment":
        """Another process's segment, to read.

        Raises:
            RuntimeError: there is none of this number and size on this machine.
        """
        try:
            file = os.open(_path(number), os.O_RDONLY)
        except OSError as error:
            raise RuntimeError(
                f"no shared memory of the learner here ({error.strerror}): weight_backend ipc wants learner and "
                "replicas on one machine"
            ) from None
        try:
            found = os.fstat(file).st_size - _HEADER
            if found != size:
                raise RuntimeError(f"the learner shares {found} bytes where {size} are to be pushed")
            # A private mapping shows what the writer writes, and keeps what is written here to itself.
            return cls(number, mmap.mmap(file, _HEADER + size, access=mmap.ACCESS_COPY), None)
        finally:
            os.close(file)

    @property
    def generation(self) -> int:
        """Odd while the writer is writing."""
        return int(self._generation.item())

    def begin(self) -> None:
        """Called by the writer: what readers have read until now may change."""
        self._generation += 1 + self.generation % 2

    def end(self) -> None:
        """Called by the writer: it is whole again."""
        self._generation += 1

    def close(self) -> None:
        """Called by the writer: nobody can attach any more; memory goes when the last reader leaves."""
        if self._file is not None:
            _path(self.number).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _path(number: int) -> Path:
    return FOLDER / f"{_PREFIX}{number:d}"


def _remove_left() -> None:
    """Removes the segments whose writers are gone: the lock goes with its process, however that ends."""
    for path in FOLDER.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(file)
