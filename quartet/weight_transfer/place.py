"""The place of a process, its machine and GPUs, from which follows how weights can reach it."""

import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class Place:
    """One process, or one replica with all its workers."""

    machine: str = ""
    """Name of the processes with which this one can share memory; empty if it has none that can be used."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it computes on, one per worker; empty on CPUs."""


def machine(shared: Path = SHARED_MEMORY, boot_id: Path = BOOT_ID, processes: Path = PROCESSES) -> str:
    """A name that is equal for two processes if each can open the other's shared memory: they are of one user, and
    see the same shared memory and, as it is opened through them, each other. Containers of one host may not."""
    try:
        parts = boot_id.read_text().strip(), os.stat(shared).st_dev, os.stat(processes).st_ino, os.getuid()
        return ":".join(map(str, parts))
    except OSError:
        return ""


def has_room(size: int, shared: Path = SHARED_MEMORY) -> bool:
    """True if `size` bytes fit into shared memory now."""
    try:
        status = os.statvfs(shared)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= size
