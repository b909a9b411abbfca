"""Dynamic batching: calls that arrive while a batch computes become the next one."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from services.common.batcher import Batcher
from services.common.errors import ResourceExhausted


class Doubler:
    """Doubles numbers in batches that wait for `gate`; a negative one breaks its batch."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.gate.wait(10)
        if any(item < 0 for item in items):
            raise ValueError(f"negative: {min(items)}")
        return [2 * item for item in items]


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


def make_batcher(doubler: Doubler, max_items: int = 100) -> Batcher[int, int]:
    return Batcher(doubler, max_items=max_items)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def busy(batcher: Batcher[int, int], doubler: Doubler) -> "asyncio.Task[Sequence[int]]":
    """A batch of one item that computes until the gate opens."""
    first = asyncio.create_task(batcher.submit([0]))
    await until(doubler.begun.is_set)
    return first


async def queued(batcher: Batcher[int, int], *calls: list[int]) -> list[Any]:
    """Calls that wait for the batch in progress."""
    tasks = [asyncio.create_task(batcher.submit(items)) for items in calls]
    await asyncio.sleep(0)
    return tasks


async def test_calls_that_arrive_meanwhile_share_the_next_batch(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1, 2], [3], [4, 5])
    doubler.gate.set()
    assert [list(result) for result in await asyncio.gather(first, *others)] == [[0], [2, 4], [6], [8, 10]]
    assert doubler.batches == [[0], [1, 2, 3, 4, 5]]
    assert len(doubler.threads) == 1
    assert threading.current_thread().name not in doubler.threads


async def test_an_idle_batcher_starts_at_once_every_time(doubler: Doubler) -> None:
    doubler.gate.set()
    batcher = make_batcher(doubler)
    assert [list(await batcher.submit([item])) for item in (1, 2)] == [[2], [4]]
    assert doubler.batches == [[1], [2]]


async def test_a_failing_call_does_not_fail_its_neighbours(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1], [2, -3], [4], [-5])
    doubler.gate.set()
    await first
    found = await asyncio.gather(*others, return_exceptions=True)
    assert [str(result) for result in found] == ["[2]", "negative: -3", "[8]", "negative: -5"]
    assert doubler.batches == [[0], [1, 2, -3, 4, -5], [1], [2, -3], [4], [-5]]
    # And the batcher works on.
    assert list(await batcher.submit([7])) == [14]


async def test_a_lone_failing_call_is_not_run_again(doubler: Doubler) -> None:
    doubler.gate.set()
    batcher = make_batcher(doubler)
    with pytest.raises(ValueError, match="negative: -1"):
        await batcher.submit([-1])
    assert doubler.batches == [[-1]]


async def test_a_cancelled_call_is_dropped_before_its_batch_and_harmless_after(doubler: Doubler) -> None:
    batcher = make_batcher(doubler)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1], [2], [3])
    others[1].cancel()
    first.cancel()
    await asyncio.wait([others[1], first])
    doubler.gate.set()
    assert [list(result) for result in await asyncio.gather(others[0], others[2])] == [[2], [6]]
    assert doubler.batches == [[0], [1, 3]]


async def test_more_than_may_wait_is_refused(doubler: Doubler) -> None:
    batcher = make_batcher(doubler, 3)
    first = await busy(batcher, doubler)
    others = await queued(batcher, [1, 2])
    # Two wait; the one that computes no longer counts.
    with pytest.raises(ResourceExhausted, match="2 items: 2 wait already and only 3 may; send fewer or try later"):
        await batcher.submit([3, 4])
    others += await queued(batcher, [5])
    others[0].cancel()
    await asyncio.wait([others[0]])
    # Whoever gave up leaves room.
    others += await queued(batcher, [6, 7])
    doubler.gate.set()
    await asyncio.gather(first, *others[1:])
    assert doubler.batches == [[0], [5, 6, 7]]


async def test_a_call_without_items_is_answered(doubler: Doubler) -> None:
    batcher = make_batcher(doubler, 3)
    doubler.gate.set()
    awaited: Awaitable[Sequence[int]] = batcher.submit([])
    assert list(await asyncio.wait_for(awaited, 10)) == []
    assert doubler.batches == []
