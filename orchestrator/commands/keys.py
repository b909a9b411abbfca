"""`quartet keys`: certificates, bearer tokens and a policy, in a folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from quartet.config.base import ConfigError
from quartet.security.identity import Role
from quartet.security.keys.folder import Keys


def make_keys(
    folder: Path, clients: Sequence[str], hosts: Sequence[str], *, tokens: bool, days: int, withdraw: bool
) -> Iterator[str]:
    """Makes keys and yields lines that say what to do with them.

    Args:
        folder: a new folder, or one of an earlier call.
        clients: NAME=ROLE of each caller that gets a new certificate or token.
        hosts: names under which callers reach the server; empty keeps the server's certificate.
        tokens: True for bearer tokens instead of client certificates.
        days: days for which certificates are valid.
        withdraw: True if what the clients had before is refused at once.

    Raises:
        ConfigError: a client has no role, a host is not a name, keys of none are to be withdrawn, or the folder holds
            something else or cannot be made.
    """
    roles = dict(_client(text) for text in clients)
    if withdraw and not roles:
        raise ConfigError("--withdraw: name the callers whose keys are to be refused, each with --client NAME=ROLE")
    keys = Keys(folder, days)
    try:
        keys.make(hosts, roles, tokens=tokens, withdraw=withdraw)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be made or read: {error.strerror}") from None
    yield f"{keys.policy}: the policy; name it as security.policy in the YAML file"
    for name, role in roles.items():
        yield f"{folder / 'clients' / name}: for {name} ({role}), who sets QUARTET_CREDENTIALS to it"
    yield f"{folder / 'ca' / 'ca.key'}: signs further certificates; no running process needs it"


def _client(text: str) -> tuple[str, Role]:
    name, _, role = text.partition("=")
    if role not in get_args(Role):
        raise ConfigError(f"--client: should be NAME=ROLE with the role {', '.join(get_args(Role))}; got {text}")
    return name, role  # type: ignore[return-value]  # one of the three
