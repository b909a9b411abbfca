"""Parts of a run that lets newcomers in: one try to start their registry, no looks for a death, and one pusher."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.push.newcomers import Desk, taking_newcomers
from orchestrator.push.pusher import WeightPusher
from protos import common_pb2
from quartet.weight_transfer.registry import Applicant


async def once(ask: Callable[[float], Awaitable[Any]], *, reason: str) -> Any:
    """Calls it once."""
    return await ask(60)


async def nobody_looks(_: Mapping[str, Applicant]) -> str:
    """Never returns: of those that died, the learner's deadline tells."""
    return await asyncio.Future()


@asynccontextmanager
async def adding_newcomers(
    pusher: WeightPusher, desk: Desk, lease: common_pb2.Lease, ttl_s: float
) -> AsyncIterator[None]:
    """Context in which a run with one pusher answers newcomers."""
    async with taking_newcomers(desk, lambda: lease, ttl_s) as newcomers, newcomers.brought_by(pusher):
        yield
