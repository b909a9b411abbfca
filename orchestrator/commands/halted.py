"""Ends ranks of the policy and registries of replicas that a signal has stopped while they start."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from orchestrator.deployment import processes
from orchestrator.deployment.cluster import Cluster
from services.common.ranks.ranks import Rank
from services.common.weight_transfer.registry import Registry

TITLES = tuple(f"ray::{kind.__name__}" for kind in (Rank, Registry))
"""Beginnings of the titles that Ray gives their processes, of this run or of one that was killed, whose place they
still take."""
LOOK_S = 2.0
"""Seconds between two looks at all processes; one that is found twice in a row is ended."""


@asynccontextmanager
async def ending_halted(head: Cluster | None) -> AsyncIterator[None]:
    """Ends stopped ranks and registries of the head while this is open. Those on a cluster of one's own are not
    seen."""
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
        ours = frozenset(pid for pid, title in stopped.items() if title.startswith(TITLES))
        for pid in ours & before:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        before = ours
