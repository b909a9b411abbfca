"""The place of a process, its machine and GPUs, from which follows how weights can reach it."""

import os
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Place:
    """One process, or one replica with all its workers."""

    machine: str = ""
    """Name of the shared memory that the process sees; empty if it has none that can be used."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it computes on, one per worker; empty on CPUs."""


def machine(shared: Path = SHARED_MEMORY, boot_id: Path = BOOT_ID) -> str:
    """A name that is equal for two processes if they see the same shared memory; containers of one host may not."""
    try:
        return f"{boot_id.read_text().strip()}:{os.stat(shared).st_dev}"
    except OSError:
        return ""


def has_room(size: int, shared: Path = SHARED_MEMORY) -> bool:
    """True if `size` bytes fit into shared memory now."""
    try:
        status = os.statvfs(shared)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize >= size
