"""Pieces of a stream that are sent together when many streams are open."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any


async def grouped(pieces: Any, gap_s: Callable[[], float]) -> AsyncIterator[bytes]:
    """Yields the first piece at once, and from then on together what has come within a gap; the last ones at once.

    Each message from a replica through Serve to a caller costs as much processor time as several tokens of a small
    model, however little it holds.

    Args:
        pieces: an async generator of bytes, which is closed at the end.
        gap_s: returns the least number of seconds between two messages at present.
    """
    waiting: list[bytes] = []
    news, over = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    waiting.append(piece)
                    news.set()
        finally:
            over.set()
            news.set()

    reading = asyncio.create_task(read())
    try:
        while not (over.is_set() and not waiting):
            await news.wait()
            news.clear()
            if waiting:
                together = b"".join(waiting)
                waiting.clear()
                yield together
                try:
                    async with asyncio.timeout(gap_s()):
                        await over.wait()
                except TimeoutError:
                    pass
            if over.is_set():
                news.set()
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
