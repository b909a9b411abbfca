"""Short work on an event loop that many requests may bring at once: one piece at a time, with others' between."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

AT_ONCE = 64 << 10
"""Bytes of a request whose work takes too little time to wait for a turn."""


class InTurn:
    """Has each piece of work wait for those before it, and the event loop answer others between two pieces.

    A hundred requests whose bodies end at the same moment would otherwise be read one after the other without a
    pause, which for 2 MiB each takes seconds in which no other request is answered, not even a health check.
    """

    def __init__(self) -> None:
        self._line = asyncio.Lock()

    async def do(self, work: Callable[[], Result], size: int) -> Result:
        """Does the work for a request of so many bytes; returns or raises what it does."""
        if size <= AT_ONCE:
            return work()
        async with self._line:
            await asyncio.sleep(0)  # holds the turn over a round of the loop, as the work itself does not
            return work()
