"""Ends ranks of the policy that a signal has stopped before they could say which process they are."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from orchestrator.deployment import processes
from orchestrator.deployment.cluster import Cluster
from services.common.ranks.ranks import Rank

TITLE = f"ray::{Rank.__name__}"
"""The title that Ray gives a rank's process, of this run or of one that was killed, whose place it still takes."""
LOOK_S = 2.0
"""Seconds between two looks at all processes; a rank that is found twice in a row is ended."""


@asynccontextmanager
async def ending_halted_ranks(head: Cluster | None) -> AsyncIterator[None]:
    """Ends stopped ranks of the head while this is open. Those on a cluster of one's own are not seen."""
    watching = asyncio.ensure_future(_watch(head)) if head else None
    try:
        yield
    finally:
        if watching:
            watching.cancel()
            await asyncio.wait([watching])


async def _watch(head: Cluster) -> None:
    before: frozenset[int] = frozenset()
    while True:
        await asyncio.sleep(LOOK_S)
        stopped = await asyncio.to_thread(lambda: processes.stopped(head.processes()))
        ranks = frozenset(pid for pid, title in stopped.items() if title.startswith(TITLE))
        for pid in ranks & before:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        before = ranks
