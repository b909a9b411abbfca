"""Fixtures that several unit tests share."""

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quartet.security.port import CALLBACK, CALLBACK_VARIABLE

if TYPE_CHECKING:
    from quartet.ranks.group import RankGroup

# Otherwise a call of Ray's that a test forgot to replace starts a cluster. When that is gone, so is the process, a
# minute later and without a word.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault(CALLBACK_VARIABLE, CALLBACK)  # replicas, which tests make without Serve, refuse to be unguarded


class Logged(logging.Handler):
    """Collects Quartet's warnings and errors as text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the record as a log would show it, with its trace."""
        self.lines.append(self.format(record))


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Warnings and errors that Quartet logs from now on."""
    logger, handler = logging.getLogger("quartet"), Logged()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
async def complaints() -> AsyncIterator[list[dict[str, Any]]]:
    """Collects what asyncio would log, such as errors of tasks that no caller waited for, once collected."""
    gc.collect()  # also those that earlier tests left
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    yield told
    loop.set_exception_handler(None)


@pytest.fixture(scope="module")
async def benches(policy_folder: Path, reward_folder: Path) -> AsyncIterator[dict[int, "RankGroup"]]:
    """One rank, and two, each in processes of its own."""
    # Here and not above: most unit tests do without DeepSpeed.
    from tests.unit.layouts import Bench
    from tests.unit.rank_processes import spawned

    async with (
        spawned(Bench, policy_folder, reward_folder, ranks=1) as (one, _),
        spawned(Bench, policy_folder, reward_folder, ranks=2) as (two, _),
    ):
        yield {1: one, 2: two}
