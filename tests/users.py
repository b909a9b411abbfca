"""Other users of this machine: commands that run under a user id of their own, in a folder of their own."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.configuration import REPO

NEEDS = "other users' ids take root, and the commands setpriv, unshare and mount"
_UNCOVER = """
place=$(mktemp -d) && mount --bind "$1" "$place" && mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1" &&
mount --move "$place" "$1" && rmdir "$place" && shift 2 && exec "$@"
"""
"""Shows Python's own folder in a mount namespace of its own, where a folder above it is closed to other users."""


def possible() -> bool:
    """True if commands can run as other users here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("setpriv", "unshare", "mount")))


@dataclass(frozen=True, slots=True)
class User:
    """A user without a name, and its folder, which others may enter and read."""

    uid: int
    folder: Path

    def run(self, *command: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Runs a command of this Python in the user's folder, given from behind `python`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUARTET_", "RAY_"))}
        own = {"HOME": str(self.folder), "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        switch = ("setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups")
        return subprocess.run(
            [*_namespace(), *switch, sys.executable, *command],
            cwd=self.folder,
            env=kept | own,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def take(self) -> None:
        """Makes the user the owner of all that lies in its folder; the tests write some of it as root."""
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def program(self, text: str, *arguments: str) -> str:
        """Runs a program, given as its text, which has to end well; its output."""
        done = self.run("-c", text, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def quartet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The `quartet` command."""
        return self.run("-m", "orchestrator.cli", *arguments)


@contextmanager
def users(*uids: int) -> Iterator[list[User]]:
    """Users with these ids, whose folders are removed at the end."""
    made = [User(uid, Path(tempfile.mkdtemp(prefix=f"user-{uid}-", dir="/tmp"))) for uid in uids]
    try:
        for user in made:
            user.take()
            user.folder.chmod(0o755)
        yield made
    finally:
        for user in made:
            shutil.rmtree(user.folder, ignore_errors=True)


def _namespace() -> tuple[str, ...]:
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001]
    if not closed:
        return ()
    return ("unshare", "--mount", "sh", "-c", _UNCOVER, "sh", str(base), str(closed[0]))


def readable(user: User, paths: Mapping[str, Path]) -> set[str]:
    """Names of those paths, files or folders or sockets, that the user can read, list or connect to."""
    read = user.program(_TRY, *(str(path) for path in paths.values())).split("\n")
    return {name for name, path in paths.items() if str(path) in read}


_TRY = """
import pathlib, socket, sys
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        if path.is_dir():
            list(path.iterdir())
        elif path.is_socket():
            socket.socket(socket.AF_UNIX).connect(str(path))
        else:
            path.read_bytes()
        print(path)
    except OSError:
        pass
"""
