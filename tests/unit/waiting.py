"""Waits for facts: until something holds, or until the event loop has come to rest."""

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any]) -> None:
    """Returns as soon as the condition holds; fails the test after a minute. No virtual time passes meanwhile."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.001)  # leaves the core to others; asyncio.sleep would wait for virtual time
        await asyncio.sleep(0)


async def settled() -> None:
    """Returns when all other tasks wait for something: a gate, a timer or a thread. What did not happen by then does
    not happen before one of those ends."""
    for _ in range(100):
        await asyncio.sleep(0)
