"""Folders and files that appear complete or not at all: written under another name, then renamed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from services.common.wire.errors import InvalidArgument

MARKER = ".quartet"
"""A file in every model that Quartet wrote. A folder without it is never replaced."""


def replace_model(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a model's folder beside its place, then moves it there.

    Raises:
        InvalidArgument: `target` holds something that Quartet did not write and that would be lost, or the folder
            cannot be made.
    """
    if target.exists() and not _may_go(target):
        raise InvalidArgument(
            f"path: {target} exists and Quartet did not write it (it holds no {MARKER}); name another folder"
        )
    aside = target.with_name(f".{target.name}.writing")
    remove(aside)
    make(aside, target)
    write(aside)
    (aside / MARKER).touch()
    remove(target)
    aside.rename(target)


def make(folder: Path, named: Path | None = None) -> None:
    """Makes the folder and its parents. InvalidArgument, which names `named` or else `folder`, if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"path: {named or folder} cannot be written: {error.strerror}") from None


def rename(path: Path, target: Path) -> None:
    """Renames a folder or a file; the new name is on disk, not only in the system's cache, when this returns."""
    path.replace(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, text: str) -> None:
    """Writes a file; its text is on disk, not only in the system's cache, when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, contents: bytes) -> None:
    """Writes a file beside its place, then moves it there, on disk and not only in the system's cache."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    rename(aside, path)


def remove(folder: Path) -> None:
    """Removes a folder and everything in it; does nothing if it does not exist."""
    if folder.exists():
        shutil.rmtree(folder)


def _may_go(target: Path) -> bool:
    """True if Quartet wrote the folder or it is empty."""
    return (target / MARKER).is_file() or (target.is_dir() and not any(target.iterdir()))
