"""Runs a campaign of faults as a command: with folders of its own, of which those with its logs stay if it fails."""

import asyncio
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_register_timeout_seconds": "240",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The environment of a quartet of tests, where neither conftest.py nor the Makefile has set it."""


def run(main: Callable[[Namespace, Path, Console], Awaitable[int]], given: Namespace, name: str) -> NoReturn:
    """Ends this process with the exit status that `main` returns for the options, a folder and a console."""
    # Short, as sockets lie in it.
    os.environ |= {"RAY_TMPDIR": tempfile.mkdtemp(prefix="qc-", dir="/tmp")} | ENVIRONMENT
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    console = Console(width=160)
    status = 1

    async def campaign() -> int:
        return await main(given, folder, console)

    try:
        status = asyncio.run(campaign())
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
        if status:
            console.print(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
    sys.exit(status)
