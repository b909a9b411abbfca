"""The desk where requests are prepared before they are admitted: one at a time, callers taking turns."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from quartet.config.limits import LimitsConfig
from quartet.serving.share import Share
from quartet.serving.slots import EngineSlots

_QUANTUM = 2 << 20
"""Bytes added to a caller's credit in each round; larger requests count as this many."""


class Desk:
    """Gives requests their turns, in the fair order in which their rows are started later.

    Rendering and tokenising 2 MiB of text takes a second of a processor, before it is known how many tokens there
    are. Without turns, a caller with a thousand of such requests would keep all others waiting.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._slots = EngineSlots(1, limits, quantum=_QUANTUM)

    @asynccontextmanager
    async def turn(self, share: Share, size: int) -> AsyncIterator[Callable[[], None]]:
        """Context of a request of `size` bytes, entered when its turn comes. Gives the function that ends the turn,
        which otherwise ends with the context."""
        begun, left = asyncio.Event(), asyncio.Event()

        async def hold(_: int) -> None:
            begun.set()
            await left.wait()

        running = self._slots.enter(share, np.asarray([min(size, _QUANTUM)], np.int32), hold)
        try:
            await begun.wait()
            yield left.set
        finally:
            left.set()
            await running.close()
