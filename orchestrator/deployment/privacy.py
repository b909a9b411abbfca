"""Settings that restrict a local Ray head, and each process that joins it, to this user and this machine."""

import os
import re
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from quartet.config.base import ConfigError
from quartet.folders import write_private
from quartet.security.port import REPLICA_HOST_VARIABLE

LONGEST_FOLDER = 38
"""Most bytes of the path of a folder for Ray's sockets: a socket's path may have 107, of which Ray needs 69."""

_PREFIX = "quartet-"
_MADE = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
"""Names of the folders that tempfile makes."""
MARKER = "head"
"""File in the folder with the secret of the head that made it."""


def make_folder(secret: str) -> Path:
    """Makes a folder that only this user can enter, for the files of a head and its processes.

    The folder lies in RAY_TMPDIR, or in /tmp if that is unset. A file in it holds the head's secret.

    Raises:
        ConfigError: the path is too long for sockets, or no folder can be made there.
    """
    place = _place()
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    except OSError as error:
        raise ConfigError(
            f"RAY_TMPDIR: no folder can be made in {place}: {error.strerror}; it should be a folder that this user "
            "can write to, or unset for /tmp"
        ) from None
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        raise ConfigError(
            f"RAY_TMPDIR: {folder.parent} is too long for the sockets that Ray makes in it; "
            f"it should have at most {LONGEST_FOLDER - len(folder.name) - 1} bytes"
        )
    write_private(folder / MARKER, secret.encode())
    return folder


def find_folder(name: str) -> Path:
    """The path at which `make_folder` made the folder of this name, if it is there still."""
    beside = _place() / name
    return next((path for path in (beside, Path("/tmp", name)) if os.path.lexists(path)), beside)


def _place() -> Path:
    place = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
    # A process that has joined a head has the head's own folder there, which is removed when the head is stopped.
    marked = os.path.exists(place / MARKER)  # which Path.exists raises for where the folder is another user's
    of_head = _MADE.fullmatch(place.name) and (marked or not os.path.exists(place))
    return place.parent if of_head else place


def remove_folder(folder: Path, secret: str, logs: Path) -> None:
    """Removes a folder from `make_folder` after its processes have ended; Ray's logs in it replace `logs`.

    Raises:
        ConfigError: the head with this secret did not make the folder.
    """
    if not os.path.lexists(folder):
        return
    if not _made_with(secret, folder):
        raise ConfigError(
            f"{folder}: not removed, as it does not hold the secret of the head that {logs.parent} names; remove "
            f"{logs.parent} if it is not yours"
        )
    for written in folder.glob("ray/session_2*/logs"):
        shutil.rmtree(logs, ignore_errors=True)
        shutil.move(written, logs)
    shutil.rmtree(folder, ignore_errors=True)


def _made_with(secret: str, folder: Path) -> bool:
    status = folder.lstat()
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
    try:
        return own and (folder / MARKER).read_bytes() == secret.encode()
    except OSError:
        return False


def compiled_folder() -> Path:
    """Folder for compiled code, which later heads use again. It is named by user id, as in containers a user may
    have no name.

    It lies in /tmp, unless another user made it or can write to it, whose code would then be run; else in .quartet.
    """
    shared = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    with suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    status = shared.lstat()
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return shared if own else Path(".quartet/compiled").resolve()


def write_token(path: Path) -> None:
    """Replaces the file with a new secret that only this user can read."""
    write_private(path, secrets.token_hex(32).encode())


def environment(token: Path, folder: Path) -> dict[str, str]:
    """Variables of the head and of each process that joins it; set them before Ray is imported."""
    return {
        # Without this Ray would replace 127.0.0.1 by the machine's outside address and open all its ports there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        REPLICA_HOST_VARIABLE: "127.0.0.1",
        # Keeps other users of this machine from Ray's ports on loopback.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token.absolute()),
        # Keeps sockets, logs, and the file by which `ray.init()` finds its head away from other users.
        "RAY_TMPDIR": str(folder),
        # Process groups would otherwise listen on the address that the host's name resolves to.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
