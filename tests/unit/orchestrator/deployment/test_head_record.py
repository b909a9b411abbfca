"""Records of a head that came from elsewhere: whatever they name is neither ended, nor removed, nor joined."""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.cli import main
from orchestrator.deployment import cluster, head_record, privacy
from orchestrator.deployment.processes import uptime_at_start
from quartet.config.base import ConfigError
from tests.unit.marked import start_marked

SECRET, OTHER = secrets.token_hex(32), secrets.token_hex(32)
NAME = "quartet-abcdefgh"
SHORT = os.environ["RAY_TMPDIR"]
"""A folder whose path is short enough for Ray."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the current folder's record."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    (tmp_path / ".quartet").mkdir(mode=0o700)
    return cluster.STATE


def record(**changes: Any) -> dict[str, Any]:
    """A record of a head that has ended."""
    ended = {"pid": 4194000, "created": 1.0, "gcs": 1, "dashboard": 2, "name": NAME, "secret": SECRET}
    return ended | changes


def put(state: Path, contents: Any, mode: int = 0o600) -> None:
    state.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    state.chmod(mode)


def precious(folder: Path) -> Path:
    """A folder with a file, which no command may remove."""
    folder.mkdir(mode=0o700)
    (folder / "thesis").write_text("years of work")
    return folder


def commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """The error of `quartet down` and of `quartet train`, each a line; both end with status 1."""
    for arguments in (["down"], ["train", "any.yaml"]):
        monkeypatch.setattr(sys, "argv", ["quartet", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        yield said


@pytest.mark.parametrize(
    "contents",
    [
        record(name="/home/me"),
        record(name="../../home"),
        record(name=".."),
        record(name="quartet-../../me"),
        record(name=NAME + "/"),
        record(name="quartet-abcdefgh\n"),
        record(name=""),
        record(secret=""),
        record(secret="x" * 64),
        record(gcs=0),
        record(dashboard="http://elsewhere"),
        record(pid=-1),
        record(created="today"),
        record(address="elsewhere:6379"),
        {"pid": 4194000, "created": 1.0, "address": "127.0.0.1:1", "folder": "/home/me", "token": "/home/me/key"},
        "[" * 100_000,
        "[]",
        "",
        "\x00",
    ],
)
def test_a_record_that_quartet_did_not_write_is_one_plain_error(
    state: Path, contents: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(state, contents)
    for said in commands(monkeypatch, capsys):
        assert said.startswith("error: .quartet/ray.json: holds no record of `quartet up`, so that nothing is ended")
    with pytest.raises(ConfigError, match="holds no record"):
        cluster.start(print)
    assert state.exists()


def test_nothing_is_removed_but_a_folder_with_the_secret(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even a folder of that name, which is this user's alone."""
    kept = precious(tmp_path / "ray" / NAME)
    put(state, record())
    monkeypatch.setattr(sys, "argv", ["quartet", "down"])
    for marker in (None, OTHER, SECRET + "\n"):
        if marker is not None:
            (kept / privacy.MARKER).write_text(marker)
        with pytest.raises(SystemExit, match="1"):
            main()
        assert f"error: {kept}: not removed, as it does not hold the secret" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="not removed"):
            cluster.start(print)
    assert (kept / "thesis").exists()
    (kept / privacy.MARKER).write_text(SECRET)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert not kept.exists()
    assert not state.exists()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o777])
def test_a_folder_that_others_may_enter_is_not_the_heads(state: Path, tmp_path: Path, mode: int) -> None:
    kept = precious(tmp_path / "ray" / NAME)
    (kept / privacy.MARKER).write_text(SECRET)
    kept.chmod(mode)
    with pytest.raises(ConfigError, match="not removed"):
        privacy.remove_folder(kept, SECRET, state.with_name("logs"))
    assert (kept / "thesis").exists()


def test_a_link_in_its_place_is_not_followed(state: Path, tmp_path: Path) -> None:
    kept = precious(tmp_path / "kept")
    (kept / privacy.MARKER).write_text(SECRET)
    link = tmp_path / "ray" / NAME
    link.symlink_to(kept)
    put(state, record())
    left = cluster.last()
    assert left
    with pytest.raises(ConfigError, match="not removed"):
        cluster.stop(left)
    assert link.is_symlink()
    assert (kept / "thesis").exists()


@pytest.mark.parametrize("name", ["ray.json", "ray.log", "lock", "logs", "token", "access"])
def test_links_beside_the_record_are_not_written_through(state: Path, tmp_path: Path, name: str) -> None:
    kept = tmp_path / "kept"
    kept.write_text(json.dumps(record()))
    Path(".quartet", name).symlink_to(kept)
    for act in (cluster.last, lambda: cluster.start(print)):
        with pytest.raises(ConfigError, match=rf"^\.quartet/{name}: is a link, which Quartet did not make, so that"):
            act()
    assert kept.read_text() == json.dumps(record())


def test_the_folder_of_the_record_is_no_link(state: Path, tmp_path: Path) -> None:
    put(state, record())
    Path(".quartet").rename("elsewhere")
    Path(".quartet").symlink_to("elsewhere")
    for act in (cluster.last, lambda: cluster.start(print)):
        with pytest.raises(ConfigError, match=r"^\.quartet: is not a folder, so that"):
            act()


@pytest.mark.parametrize("path", [".quartet", ".quartet/ray.json"])
def test_what_others_may_change_is_not_believed(state: Path, path: str) -> None:
    put(state, record())
    Path(path).chmod(Path(path).stat().st_mode | 0o020)
    with pytest.raises(ConfigError, match=rf"^{path}: can be changed by other users \(chmod go-w\), so that"):
        cluster.running()


def test_a_record_of_another_user_is_not_believed(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(state, record())
    with pytest.raises(ConfigError, match=r"^\.quartet: belongs to another user"):
        head_record.read(state, user=os.geteuid() + 1)
    if os.geteuid() == 0:
        os.chown(state, 65534, 65534)
        for said in commands(monkeypatch, capsys):
            assert said.startswith("error: .quartet/ray.json: belongs to another user, so that nothing is ended")


@pytest.fixture
def strangers() -> Iterator[list[psutil.Process]]:
    """Living processes: one without a mark, one of another head, and, for root, one of another user with the mark."""
    started = [subprocess.Popen(["sleep", "600"]), start_marked(OTHER)]
    if os.geteuid() == 0:
        started.append(start_marked(SECRET, user=65534))
    yield [psutil.Process(process.pid) for process in started]
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.processes
def test_a_living_process_that_is_not_the_head_is_neither_joined_nor_ended(
    state: Path, strangers: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "before")
    for process in strangers:
        put(state, record(pid=process.pid, created=uptime_at_start(process)))
        assert cluster.running() is None
        cluster.join()
        assert os.environ["RAY_AUTH_TOKEN_PATH"] == "before"
        left = cluster.last()
        assert left
        assert left.processes() == []
        cluster.stop(left, patience_s=0.1)
        assert process.is_running()
        assert process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.processes
def test_a_head_is_found_by_a_command_with_another_folder_for_rays_files(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", SHORT)
    folder = privacy.make_folder(SECRET)
    head = start_marked(SECRET, RAY_TMPDIR=str(folder))
    try:
        created = uptime_at_start(psutil.Process(head.pid))
        put(state, record(pid=head.pid, created=created, name=folder.name))
        for place in (str(tmp_path), str(folder), ""):
            monkeypatch.setenv("RAY_TMPDIR", place)
            found = cluster.running()
            assert found
            assert found.folder == str(folder)
        assert found
        # The clock is set: psutil adds the time at which the machine was started, which follows the clock.
        set_by = psutil.boot_time() + 100
        with monkeypatch.context() as clock:
            clock.setattr("psutil._pslinux.boot_time", lambda: set_by)
            assert psutil.boot_time() == set_by
            assert cluster.running() == found
        cluster.stop(found, patience_s=0.5)
        assert head.wait(10) != 0
        assert not folder.exists()
        assert not state.exists()
    finally:
        head.kill()
        head.wait()
