"""The folder of a run: one process at a time works in it."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.config import ConfigError
from services.common.findings import shown


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Nobody else trains this run while this is open. The lock ends with its process, however that ends.

    Raises:
        ConfigError: somebody does.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run_dir} is being trained by another process; stop it, or wait for it") from None
        yield


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """What a configuration says now and did not say before, a line for each key."""
    found: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        old, new, path = before.get(key), now.get(key), f"{where}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{path}.")
        elif old != new:
            found.append(f"{path}: {shown(old)} when the run began, {shown(new)} now")
    return found
