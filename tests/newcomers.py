"""Stand-ins for a run that lets newcomers in: one try to start their registry, and no looks for a death."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quartet.weight_transfer.registry import Applicant


async def once(ask: Callable[[float], Awaitable[Any]], *, reason: str) -> Any:
    """Calls it once."""
    return await ask(60)


async def nobody_looks(_: Mapping[str, Applicant]) -> str:
    """Never returns: of those that died, the learner's deadline tells."""
    return await asyncio.Future()
