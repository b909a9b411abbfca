"""Waits for facts: until something holds, or until the event loop has come to rest."""

import asyncio
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Returns as soon as the condition holds; TimeoutError after ten seconds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def settled() -> None:
    """Returns when all other tasks wait for something: a gate, a timer or a thread. What did not happen by then does
    not happen before one of those ends."""
    for _ in range(100):
        await asyncio.sleep(0)
