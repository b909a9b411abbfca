"""The record of a head, by which later commands in the folder find it, without belief in what a record says.

A folder may have come from elsewhere, with a record that Quartet did not write. So a record names no path and no
machine: only a folder whose marker, and processes whose environment, hold its secret are taken for those of the head.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from quartet.config.base import Config, ConfigError, PortNumber
from quartet.folders import write_private


class HeadRecord(Config):
    """A head that `quartet up` started in this folder."""

    pid: Annotated[int, Field(ge=1)]
    """Process of the head; while it is being started, the one that starts it."""
    created: float
    """Seconds from the machine's start to that of the process, to tell it from a later process with the same pid."""
    gcs: PortNumber
    """Port of the GCS on 127.0.0.1."""
    dashboard: PortNumber
    """Port of the dashboard on 127.0.0.1."""
    name: Annotated[str, Field(pattern=r"^quartet-[a-z0-9_]{8}$")]
    """Name of the folder that its processes write to, directly in RAY_TMPDIR or /tmp."""
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Proof that a folder or a process belongs to this head."""


def write(state: Path, record: HeadRecord) -> None:
    """Replaces the record."""
    write_private(state, record.model_dump_json().encode())


def read(state: Path, user: int | None = None) -> HeadRecord | None:
    """The record, if there is one.

    Args:
        state: the file.
        user: id of the user who has to own it; None for this process's.

    Raises:
        ConfigError: the file or its folder may be another user's work, or the file holds something else.
    """
    if not os.path.lexists(state.parent):
        return None
    check_place(state.parent, user)
    if not os.path.lexists(state):
        return None
    _check(state, stat.S_ISREG, "a file", state.parent, user)
    try:
        return HeadRecord.model_validate_json(state.read_bytes())
    except (ValidationError, RecursionError):
        raise _refused(state, "holds no record of `quartet up`", state.parent) from None


def check_place(folder: Path, user: int | None = None) -> None:
    """Raises ConfigError if the folder of a record is a link, another user's, or holds links, through which Quartet
    would write elsewhere."""
    _check(folder, stat.S_ISDIR, "a folder", folder, user)
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            raise _refused(entry, "is a link, which Quartet did not make", folder)


def _check(path: Path, is_kind: Callable[[int], bool], kind: str, folder: Path, user: int | None) -> None:
    status = path.lstat()
    if not is_kind(status.st_mode):
        raise _refused(path, f"is not {kind}", folder)
    if status.st_uid != (os.geteuid() if user is None else user):
        raise _refused(path, "belongs to another user", folder)
    if status.st_mode & 0o022:
        raise _refused(path, "can be changed by other users (chmod go-w)", folder)


def _refused(path: Path, reason: str, folder: Path) -> ConfigError:
    return ConfigError(
        f"{path}: {reason}, so that nothing is ended, removed or joined by it; remove {folder} if it is not yours"
    )
