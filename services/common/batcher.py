"""Dynamic batching: while one batch computes, the calls that arrive become the next."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from services.common.errors import ResourceExhausted

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Runs a function of many items for many callers at a time.

    No call waits for company: a batch starts the moment the last one ends, with whatever is there. Compared with
    a fixed waiting time this costs an idle service nothing and a busy one batches by itself. The function runs in
    a thread of its own, so that health checks and new calls are answered meanwhile.
    """

    def __init__(self, run: Callable[[Sequence[Item]], Any], *, max_items: int) -> None:
        """
        Args:
            run: a sequence or array of one result per item, in order; never runs twice at the same time.
            max_items: most items that may wait; more are refused with RESOURCE_EXHAUSTED.
        """
        self._run = run
        self._max_items = max_items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batcher")
        self._waiting: list[tuple[Sequence[Item], asyncio.Future[Sequence[Result]]]] = []
        self._working: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """It computes."""
        return self._working is not None

    async def submit(self, items: Sequence[Item]) -> Sequence[Result]:
        """The results for `items`, in order. Cancelling drops them if their batch has not begun.

        Raises:
            ResourceExhausted: too many items wait already.
        """
        waiting = sum(len(queued) for queued, future in self._waiting if not future.done())
        if waiting + len(items) > self._max_items:
            raise ResourceExhausted(
                f"{len(items)} items: {waiting} wait already and only {self._max_items} may; send fewer or try later"
            )
        future: asyncio.Future[Sequence[Result]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                calls = [(items, future) for items, future in self._waiting if not future.done()]
                self._waiting.clear()
                everything = [item for items, _ in calls for item in items]
                if not everything:
                    _hand_out(calls, [])
                    continue
                try:
                    results = await loop.run_in_executor(self._thread, self._run, everything)
                except Exception as error:
                    await self._one_by_one(calls, error)
                else:
                    _hand_out(calls, results)
        finally:
            self._working = None

    async def _one_by_one(
        self, calls: list[tuple[Sequence[Item], "asyncio.Future[Sequence[Result]]"]], error: Exception
    ) -> None:
        """After a failed batch: only the call that causes the failure may feel it."""
        if len(calls) == 1:
            _fail(calls[0][1], error)
            return
        for items, future in calls:
            try:
                results = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, items)
            except Exception as own:
                _fail(future, own)
            else:
                _hand_out([(items, future)], results)


def _fail(future: "asyncio.Future[Sequence[Result]]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _hand_out(
    calls: list[tuple[Sequence[Item], "asyncio.Future[Sequence[Result]]"]], results: Sequence[Result]
) -> None:
    start = 0
    for items, future in calls:
        if not future.done():
            future.set_result(results[start : start + len(items)])
        start += len(items)
