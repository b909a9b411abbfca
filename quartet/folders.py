"""Folders and files that appear complete or not at all: written under another name, then renamed."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quartet.wire.errors import InvalidArgument

MARKER = ".quartet"
"""A file in every model that Quartet wrote, with its owner. A folder without it is never replaced."""


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder beside its place, then moves it there. If `write` fails, `target` stays as it was. Where a link
    leads to a folder, that folder is replaced.

    Raises:
        InvalidArgument: the folder cannot be made.
    """
    target = target.resolve()
    aside, before = (target.with_name(f".{target.name}.{state}") for state in ("writing", "replaced"))
    if before.exists() and not target.exists():
        rename(before, target)  # a process was killed between the two renames below
    remove(aside)
    remove(before)
    make(aside, target)
    try:
        write(aside)
    except BaseException:
        remove(aside)
        raise
    if target.exists():
        rename(target, before)
    rename(aside, target)
    remove(before)


def replace_model(target: Path, write: Callable[[Path], None], owner: str) -> None:
    """Replaces a model's folder.

    Args:
        target: the folder.
        write: writes the model into the folder that it is given.
        owner: kind of the model, with the run if only that run may replace it, such as "policy" or "critic of a1b2".

    Raises:
        InvalidArgument: `target` holds something that would be lost and that Quartet did not write or wrote for
            another owner, or the folder cannot be made.
    """

    def marked(aside: Path) -> None:
        write(aside)
        (aside / MARKER).write_text(owner)

    if problem := _kept(target, owner):
        raise InvalidArgument(f"path: {problem}")
    replace_folder(target, marked)


def unreplaceable(target: Path, owner: str) -> str:
    """The reason for which `replace_model` would refuse a folder; empty if it would not. Makes nothing."""
    return _kept(target, owner) or unusable(target.resolve().parent)


def _kept(target: Path, owner: str) -> str:
    """The reason for which a folder is not this owner's to replace; empty if it is."""
    if (target / MARKER).is_file():
        if (found := (target / MARKER).read_text(errors="replace")) != owner:
            return (
                f"{target} holds another model ({found or 'of an unknown owner'}, and this is {owner}); name another "
                "folder"
            )
    elif target.exists() and not (target.is_dir() and not any(target.iterdir())):
        return f"{target} exists and Quartet did not write it (it holds no {MARKER}); name another folder"
    return ""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which a file or folder is written: an OSError that says of none which it is, as that of a full disk,
    names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def opened(path: Path, mode: str, named: Path) -> Iterator[BinaryIO]:
    """A file of bytes that is open in the context. Closing it writes again what a full disk did not take, and names
    `named` in its error as `naming` does; errors of the context stay as they are."""
    file: BinaryIO = path.open(mode)  # type: ignore[assignment]
    try:
        yield file
    finally:
        with naming(named):
            file.close()


def make(folder: Path, named: Path | None = None) -> None:
    """Makes the folder and its parents. InvalidArgument, which names `named` or else `folder`, if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"path: {named or folder} cannot be written: {error.strerror}") from None


def unusable(folder: Path) -> str:
    """The reason for which a folder cannot be made, or be written to if it exists; empty if it can. Makes nothing."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            return (
                f"{place} is a link to {os.readlink(place)}, which does not exist; remove it, or choose another place"
            )
        if place.exists() and not place.is_dir():
            return f"{place} is a file and should be a folder; remove it, or choose another place"
        if place.exists():
            if os.access(place, os.W_OK | os.X_OK):
                return ""
            return f"{place} may not be written to; correct its permissions, or choose another place"
    return ""


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
    with naming(path), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, *contents: bytes | memoryview) -> None:
    """Writes a file, piece by piece, beside its place, then moves it there; on disk and not only in the system's
    cache."""
    aside = path.with_name(f".{path.name}.writing")
    aside.unlink(missing_ok=True)
    with naming(path):
        _write_new(aside, 0o666, *contents)
    rename(aside, path)


def write_private(path: Path, contents: bytes, *, replace: bool = True) -> None:
    """Writes a file with mode 0600, which no other user can read and which appears complete or not at all.

    Raises:
        FileExistsError: the file exists and `replace` is false.
    """
    # Two processes may write it at the same time: each has an aside of its own, and the first to link it wins.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with naming(path):
        _write_new(aside, 0o600, contents)
    if replace:
        rename(aside, path)
        return
    try:
        os.link(aside, path)
    finally:
        aside.unlink()


def make_private(folder: Path) -> Path:
    """Makes the folder with mode 0700, or sets that mode if it exists."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def remove(folder: Path) -> None:
    """Removes a folder and everything in it; does nothing if it does not exist."""
    if folder.exists():
        shutil.rmtree(folder)


def _write_new(path: Path, mode: int, *contents: bytes | memoryview) -> None:
    """Writes a file that must not exist, so that no existing file or link is written through."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.writelines(contents)
        file.flush()
        os.fsync(file.fileno())
