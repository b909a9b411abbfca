"""Calls that are gathered: each gets its own result, although others are cancelled meanwhile."""

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest

from quartet.wire.together import Together
from tests.unit.waiting import settled


class Work:
    """Work that goes on when it is told to, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.goes_on = asyncio.Event()

    async def __call__(self, asked: Sequence[int]) -> list[int]:
        self.asked.append(list(asked))
        await self.goes_on.wait()
        return [10 * each for each in asked]


async def test_those_that_wait_are_asked_together_and_not_too_many() -> None:
    work = Work()
    together = Together(work, 3)
    calls = [asyncio.create_task(together(number)) for number in range(2)]
    await settled()
    calls += [asyncio.create_task(together(number)) for number in range(2, 7)]
    await settled()
    work.goes_on.set()
    assert await asyncio.gather(*calls) == [0, 10, 20, 30, 40, 50, 60]
    assert work.asked == [[0, 1], [2, 3, 4], [5, 6]]


async def test_nothing_is_done_for_those_that_were_cancelled() -> None:
    work = Work()
    together = Together(work, 2)
    cancelled = [asyncio.create_task(together(number)) for number in range(6)]
    await settled()
    for call in cancelled:
        call.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    work.goes_on.set()
    async with asyncio.timeout(5):
        assert await together(6) == 60
    assert work.asked == [[0, 1], [6]]


async def test_work_that_has_begun_is_done_once_for_the_others_when_one_is_cancelled() -> None:
    work = Work()
    together = Together(work)
    first, *others = [asyncio.create_task(together(number)) for number in range(3)]
    await settled()
    first.cancel()
    await settled()
    work.goes_on.set()
    assert await asyncio.gather(*others) == [10, 20]
    assert first.cancelled()
    assert work.asked == [[0, 1, 2]]


async def test_the_end_of_the_work_s_own_task_ends_all_that_wait() -> None:
    work = Work()
    together = Together(work, 2)
    calls = [asyncio.create_task(together(number)) for number in range(3)]
    await settled()
    assert together._task is not None
    together._task.cancel()
    async with asyncio.timeout(5):
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 3
    work.goes_on.set()
    assert await together(3) == 30


async def test_an_error_for_which_nobody_waits_any_more_is_dropped(complaints: list[Any]) -> None:
    fails = asyncio.Event()

    async def failing(asked: Sequence[int]) -> list[int]:
        if asked == [0]:
            await fails.wait()
            raise KeyError("work")
        return list(asked)

    together = Together(failing)
    first = asyncio.create_task(together(0))
    await settled()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    fails.set()
    async with asyncio.timeout(5):
        assert await together(1) == 1
    del first
    gc.collect()
    assert complaints == []


async def test_work_that_fails_or_gives_too_few_results_fails_all_that_were_asked_together() -> None:
    async def too_few(asked: Sequence[int]) -> list[int]:
        return list(asked[1:])

    async def failing(_: Sequence[int]) -> list[int]:
        raise KeyError("work")

    for work, error in ((too_few, RuntimeError), (failing, KeyError)):
        together = Together(work)
        async with asyncio.timeout(5):
            ends = await asyncio.gather(*map(together, range(3)), return_exceptions=True)
        assert [type(end) for end in ends] == [error] * 3
        with pytest.raises(error):
            await together(1)
