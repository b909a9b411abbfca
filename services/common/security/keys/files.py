"""Private files and folders: no other user can read them, not even while they are written."""

import os
import secrets
from pathlib import Path


def make_private(folder: Path) -> Path:
    """Makes the folder with mode 0700, or sets that mode if it exists."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, contents: bytes, *, replace: bool = True) -> None:
    """Writes a file with mode 0600, completely or not at all: a process that watches it never reads half of it.

    Raises:
        FileExistsError: the file exists and `replace` is false.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Opened exclusively, so that an existing file or link is never written through.
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    if replace:
        aside.replace(path)
        return
    try:
        os.link(aside, path)
    finally:
        aside.unlink()
