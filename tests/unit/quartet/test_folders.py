"""Folders and files that appear complete or not at all."""

from pathlib import Path

import pytest

from quartet.folders import replace_file, replace_folder, replace_model, write_private
from quartet.wire.errors import InvalidArgument


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
