"""Folders that are whole or not there: written aside, then renamed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from services.common.errors import InvalidArgument


def replace_model(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a model's folder beside its place, then moves it there.

    Raises:
        InvalidArgument: something other than a model or an empty folder is there, which would be lost, or no
            folder can be made there.
    """
    if target.exists() and not _may_go(target):
        raise InvalidArgument(f"path: {target} exists and is no model; name a new folder, or a model to replace")
    aside = target.with_name(f".{target.name}.writing")
    remove(aside)
    make(aside, target)
    write(aside)
    remove(target)
    aside.rename(target)


def make(folder: Path, named: Path | None = None) -> None:
    """Makes the folder and its parents; InvalidArgument if that cannot be, about `named` if it is another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"path: {named or folder} cannot be written: {error.strerror}") from None


def rename(folder: Path, target: Path) -> None:
    """Renames for good: the new name is on disk when this returns."""
    folder.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, text: str) -> None:
    """Writes a file for good: its text is on disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Removes a folder with all that is in it, or does nothing if there is none."""
    if folder.exists():
        shutil.rmtree(folder)


def _may_go(target: Path) -> bool:
    """It is a model, or an empty folder."""
    return (target / "config.json").is_file() or (target.is_dir() and not any(target.iterdir()))
