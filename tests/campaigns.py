"""Runs a campaign of faults as a command: with folders of its own, of which those with its logs stay if it fails."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

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


Main = Callable[[Namespace, Path, Console, Callable[[str], None]], Coroutine[Any, Any, list[str]]]


def run(main: Main, given: Namespace, name: str) -> NoReturn:
    """Ends this process with 1 if there are problems, which are printed.

    Args:
        main: returns the problems. It gets the options, a folder, a console, and what prints a line with its time.
        given: the options.
        name: the campaign's, with which the folder's name begins.
    """
    # Short, as sockets lie in it.
    os.environ |= {"RAY_TMPDIR": tempfile.mkdtemp(prefix="qc-", dir="/tmp")} | ENVIRONMENT
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    console, began, failed = Console(width=160), time.monotonic(), True

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:7.1f} {text}", markup=False, highlight=False)

    try:
        problems = asyncio.run(main(given, folder, console, say))
        for problem in problems[:40]:
            console.print(problem, markup=False, highlight=False)
        failed = bool(problems)
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
        if failed:
            console.print(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
    sys.exit(failed)
