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

from tests.chaos.settings import ENVIRONMENT


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
