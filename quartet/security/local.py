"""The owner's token for a port on loopback: `quartet up` makes it, and every caller in its folder sends it.

Loopback keeps other machines out and lets every user of this one in. What tells them apart is who can read a file.
"""

import contextlib
import os
import secrets
import shutil
from pathlib import Path

import yaml

from quartet.folders import make_private, write_private
from quartet.security.policy import digest

FOLDER = Path(".quartet/access")
"""In the folder of `quartet up`, mode 0700: the token, the policy that asks for it, and credentials for the port."""
OWNER = "owner"
"""Name of the one identity; a trainer."""
_HEADER = "# Made by `quartet up`, removed by `quartet down`. security.policy in the YAML file replaces it.\n"


def policy_in(folder: Path = FOLDER) -> Path:
    """The policy file that `let_owner_in` makes."""
    return folder / "policy.yaml"


def let_owner_in(port: int, folder: Path = FOLDER) -> None:
    """Makes what is not there yet, and names the port. A server that runs takes it up within a second.

    Args:
        port: on 127.0.0.1. The token is sent to it and to no other.
        folder: for no other user.
    """
    make_private(folder)
    token = folder / "token"
    # The first of two that come together decides; what follows from the token is the same for both.
    with contextlib.suppress(FileExistsError):
        write_private(token, secrets.token_urlsafe(32).encode(), replace=False)
    identity = {"role": "trainer", "tokens": [digest(token.read_text(encoding="ascii"))]}
    targets = {f"{host}:{port}": f"{OWNER}.yaml" for host in ("127.0.0.1", "localhost")}
    for name, values in {
        policy_in(folder).name: {"identities": {OWNER: identity}},
        f"{OWNER}.yaml": {"token_file": token.name, "plaintext": True},
        "credentials.yaml": {"targets": targets},
    }.items():
        write_private(folder / name, (_HEADER + yaml.safe_dump(values)).encode())


def shut(folder: Path) -> None:
    """Removes all of it."""
    shutil.rmtree(folder, ignore_errors=True)


def own_credentials(user: int | None = None) -> Path | None:
    """The credentials file of this folder, if the user (None: of this process) made it: another user's could make
    this process send one of its own files."""
    try:
        stat = FOLDER.lstat()
    except OSError:
        return None
    file = FOLDER / "credentials.yaml"
    own = stat.st_uid == (os.geteuid() if user is None else user) and not stat.st_mode & 0o022
    return file if own and file.exists() else None
