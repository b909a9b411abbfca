"""Folders and files that appear complete or not at all."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from quartet import folders
from quartet.folders import naming, opened, replace_file, replace_folder, replace_model, write_private
from quartet.wire.errors import InvalidArgument


@pytest.mark.parametrize(
    "written",
    [
        lambda path: replace_file(path, b"text"),
        lambda path: write_private(path, b"text"),
        lambda path: folders.write(path, "text"),
    ],
)
def test_a_disk_that_is_full_is_that_of_the_file_that_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Callable[[Path], None]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        written(tmp_path / "file")
    assert raised.value.filename == str(tmp_path / "file")


def test_a_disk_that_is_full_as_a_file_is_closed_is_that_of_the_file_and_no_other_error_is(tmp_path: Path) -> None:
    named = tmp_path / "file"
    with pytest.raises(OSError, match="No space left") as raised, opened(Path("/dev/full"), "wb", named) as file:
        file.write(b"text")
    assert raised.value.filename == str(named)
    error = OSError(errno.EIO, "of the input")
    with pytest.raises(OSError, match="of the input") as raised, opened(named, "wb", named):
        raise error
    assert raised.value is error


def test_an_error_that_names_its_file_keeps_that_name(tmp_path: Path) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no such file", "other"), OSError("of no number")):
        with pytest.raises(OSError, match="no") as raised, naming(tmp_path):
            raise error
        assert raised.value is error


def test_a_folder_whose_writing_fails_stays_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "model"
    replace_folder(target, lambda aside: (aside / "a").touch())

    def fail(aside: Path) -> None:
        (aside / "b").touch()
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        replace_folder(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["a"]


@pytest.mark.parametrize("steps", range(4))
def test_a_process_that_is_killed_while_it_replaces_a_folder_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Killed before one of the steps after the writing: two renames, and the removal of what was replaced."""
    target = tmp_path / "model"
    replace_folder(target, lambda aside: (aside / "old").touch())
    left: list[int] = []

    def killed_before(step: Callable[..., None]) -> Callable[..., None]:
        def run(*paths: Path) -> None:
            if left and not left[0]:
                raise SystemExit
            if left:
                left[0] -= 1
            step(*paths)

        return run

    def begin(aside: Path) -> None:
        (aside / "new").touch()
        left.append(steps)

    with monkeypatch.context() as patched:
        for step in ("rename", "remove"):
            patched.setattr(folders, step, killed_before(getattr(folders, step)))
        with nullcontext() if steps == 3 else pytest.raises(SystemExit):
            replace_folder(target, begin)

    def fail(_: Path) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        replace_folder(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["old" if steps < 2 else "new"]


def test_where_a_link_leads_the_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    replace_folder(tmp_path / "model", lambda aside: (aside / "a").touch())
    assert (tmp_path / "model").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["a"]


def test_a_file_is_not_written_through_a_link_that_lies_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / ".file.writing").symlink_to(tmp_path / "other")
    replace_file(tmp_path / "file", b"new")
    assert ((tmp_path / "file").read_text(), (tmp_path / "other").read_text()) == ("new", "kept")


def test_a_private_file_is_its_owners_and_is_kept_where_nothing_is_to_be_replaced(tmp_path: Path) -> None:
    write_private(tmp_path / "token", b"first")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "token", b"second", replace=False)
    assert (tmp_path / "token").read_bytes() == b"first"
    write_private(tmp_path / "token", b"third")
    assert (tmp_path / "token").read_bytes() == b"third"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("others", ["policy", "critic of another", "critic", ""])
def test_a_model_of_another_kind_or_run_is_kept(tmp_path: Path, others: str) -> None:
    """A critic is saved by name under a root where policies may lie too."""
    target = tmp_path / "demo" / "policy"
    replace_model(target, lambda folder: (folder / "theirs").touch(), others)
    with pytest.raises(InvalidArgument, match=f"^path: {target} holds another model "):
        replace_model(target, lambda folder: (folder / "ours").touch(), "critic of this")
    assert sorted(path.name for path in target.iterdir()) == [".quartet", "theirs"]
    replace_model(target, lambda folder: (folder / "newer").touch(), others)
    assert sorted(path.name for path in target.iterdir()) == [".quartet", "newer"]
