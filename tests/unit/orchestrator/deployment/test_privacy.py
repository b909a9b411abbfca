"""Folder, token and lock of a head, and the ports that its file asks for."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from orchestrator.deployment.listeners import PortError, check_ports
from orchestrator.deployment.lock import held
from orchestrator.deployment.privacy import (
    LONGEST_FOLDER,
    MARKER,
    compiled_folder,
    environment,
    find_folder,
    make_folder,
    write_token,
)
from quartet.config.base import ConfigError
from tests.strangers import own_address

HOLD = "import sys, time; from pathlib import Path; from orchestrator.deployment.lock import held\n" + (
    "with held(Path(sys.argv[1]), 1): print('held', flush=True); time.sleep(600)"
)

GROUP = """
import socket, sys
import psutil
from torch import distributed
socket.sethostname(sys.argv[1])
distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
print(*(connection.laddr.ip for connection in psutil.Process().net_connections("tcp")))
"""


def test_a_folder_is_this_users_alone_and_short_enough_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder("secret")
    assert folder.parent == Path(os.environ["RAY_TMPDIR"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(str(folder)) <= LONGEST_FOLDER
    assert (folder / MARKER).read_text() == "secret"
    assert (folder / MARKER).stat().st_mode & 0o777 == 0o600
    # The longest that Ray makes: pids have seven digits at most.
    path = folder / "ray" / "session_2026-11-22_01-15-22_123456_4194304" / "sockets" / "plasma_store"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_a_folder_that_is_too_long_is_refused_by_the_variable_that_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * LONGEST_FOLDER)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(ConfigError, match=r"^RAY_TMPDIR: .* is too long .* should have at most 21 bytes$"):
        make_folder("secret")
    assert list(long.iterdir()) == []


def test_a_process_that_has_joined_a_head_makes_the_next_ones_folder_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, first = Path(os.environ["RAY_TMPDIR"]), make_folder("first")
    monkeypatch.setenv("RAY_TMPDIR", str(first))
    assert make_folder("second").parent == place
    assert find_folder(first.name) == first
    shutil.rmtree(first)  # as `quartet down` does
    assert make_folder("third").parent == place


@pytest.mark.parametrize("name", ["none", "quartet-none"])
def test_a_place_without_room_for_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / name))
    with pytest.raises(ConfigError, match=rf"^RAY_TMPDIR: no folder can be made in .*/{name}: No such file"):
        make_folder("secret")


def test_compiled_code_is_never_taken_from_where_another_user_may_have_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shared, private = tmp_path / f"torchinductor_{os.getuid()}", tmp_path / ".quartet/compiled"
    assert compiled_folder() == shared
    assert shared.stat().st_mode & 0o777 == 0o700
    assert compiled_folder() == shared
    shared.chmod(0o777)
    assert compiled_folder() == private
    shared.rename(tmp_path / "elsewhere")
    shared.symlink_to(tmp_path / "elsewhere")
    assert compiled_folder() == private
    shared.unlink()
    shared.write_text("no folder")
    assert compiled_folder() == private


def test_a_token_is_another_each_time_and_this_users_alone(tmp_path: Path) -> None:
    token = tmp_path / "token"
    actual = set()
    for _ in range(3):
        token.touch(0o666)
        write_token(token)
        assert token.stat().st_mode & 0o777 == 0o600
        actual.add(token.read_text())
    assert {len(secret) for secret in actual} == {64}
    assert len(actual) == 3


def test_processes_that_join_are_told_all_of_it(tmp_path: Path) -> None:
    told = environment(Path("token"), tmp_path)
    assert told["RAY_AUTH_TOKEN_PATH"] == str(Path.cwd() / "token")
    assert (told["RAY_AUTH_MODE"], told["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("token", "0")
    assert told["RAY_TMPDIR"] == str(tmp_path)


@pytest.mark.processes
def test_a_process_group_stays_on_loopback_whatever_the_hosts_name_resolves_to(tmp_path: Path) -> None:
    """The machine is called by its outside address, in a namespace for names."""
    namespace = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--uts"]
    actual = []
    for variables in ({}, environment(tmp_path, tmp_path)):
        done = subprocess.run(
            [*namespace, sys.executable, "-c", GROUP, own_address()],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        actual.append(done.stdout.split())
    assert actual == [[own_address()], ["127.0.0.1"]]


@pytest.mark.processes
def test_a_lock_is_waited_for_and_ends_with_its_process(tmp_path: Path) -> None:
    lock, waited = tmp_path / "lock", []
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    late = pytest.raises(TimeoutError, match=r"lock was still held by another process after 0.3 s")
    with late, held(lock, 0.3, lambda: waited.append(1)):
        pass
    assert waited == [1]
    holder.kill()
    with held(lock, 10):
        pass
    holder.wait(10)


def test_a_port_that_is_taken_is_named_by_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortError, match=rf"^grpc_options.port: {port} cannot be used: .*; choose another$"):
            check_ports({"grpc_options.port": port})
    check_ports({"grpc_options.port": port})
