"""A process of its own that keeps the front door open until its input ends, and prints its target. Its argument is
the path of a policy file."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.deployment.head import _environment
from quartet.security.port import Port
from tests.configuration import REPO
from tests.unit.front_door import front_door


@contextmanager
def door(policy: Path, log: Path, files: int | None = None) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Target and process, which has the environment that `quartet up` gives to Serve's proxy, writes its errors to
    `log` and may open so many files."""
    environment = os.environ | {"PYTHONPATH": str(REPO), "GRPC_VERBOSITY": _environment()["GRPC_VERBOSITY"]}
    command = [sys.executable, "-m", "tests.unit.door_process", str(policy)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        if files is not None:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
        assert process.stdout
        yield process.stdout.readline().strip(), process


async def main(policy: Path) -> None:
    async with front_door(Port(policy=policy)) as (target, _):
        print(target, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
