"""Pieces of a stream: the first at once, the others together, none lost."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from quartet.serving.grouped import grouped


async def test_the_first_comes_at_once_and_what_comes_within_a_gap_together() -> None:
    more, end = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"1"
        await more.wait()
        for piece in (b"2", b"3", b"4"):
            yield piece
        await end.wait()
        yield b"5"

    got = grouped(pieces(), lambda: 0.05)
    assert await anext(got) == b"1"
    more.set()
    assert await anext(got) == b"234"
    end.set()
    assert [each async for each in got] == [b"5"]


async def test_the_end_waits_for_no_gap() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"1", b"2"):
            yield piece
            await asyncio.sleep(0)

    async with asyncio.timeout(30):
        assert b"".join([each async for each in grouped(pieces(), lambda: 3600.0)]) == b"12"
        assert [each async for each in grouped(_none(), lambda: 3600.0)] == []


async def _none() -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for piece in nothing:
        yield piece


async def test_an_error_comes_after_what_came_before_it_and_leaving_ends_the_source() -> None:
    closed = asyncio.Event()

    async def pieces(fails: bool) -> AsyncIterator[bytes]:
        try:
            yield b"1"
            if fails:
                raise ValueError("broken")
            await asyncio.Event().wait()
        finally:
            closed.set()

    got = grouped(pieces(True), lambda: 0.0)
    assert await anext(got) == b"1"
    with pytest.raises(ValueError, match="broken"):
        await anext(got)
    assert closed.is_set()
    closed.clear()
    left = grouped(pieces(False), lambda: 0.0)
    assert await anext(left) == b"1"
    await left.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()
