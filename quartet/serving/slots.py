"""Rows of many calls processed one by one in a fair order, with a limit on how many run at a time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from quartet.config.limits import LimitsConfig
from quartet.serving.fair_queue import FairQueue
from quartet.serving.guests import Guests
from quartet.serving.share import Share
from quartet.wire.callers import Purpose

Answer = TypeVar("Answer")

SURPLUS = 2
"""Training rows that may be started per slot of the engine, so that the engine always has a next row."""
BURST = 8
"""Rows started before other tasks of the event loop get their turn."""
LOOK_S = 1.0
"""Longest time until it is looked again whether a run still holds the engine."""
_ANY_NUMBER = 1 << 30
"""Tokens of a row, of which there may be any number: the engine limits them itself."""


class Running(Generic[Answer]):
    """The rows of one call: waiting, running or done."""

    def __init__(
        self, slots: "EngineSlots", share: Share, rows: int, start: Callable[[int], Awaitable[Answer]]
    ) -> None:
        self._slots = slots
        self.share = share
        self.start = start
        self.left = rows
        """Rows that `finished` has not returned yet."""
        self._under_way: set[asyncio.Future[Answer]] = set()
        self._done: list[asyncio.Future[Answer]] = []
        self._news = asyncio.Event()

    def begun(self, task: "asyncio.Future[Answer]") -> None:
        """Records that a row is running; called by the slots."""
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Future[Answer]") -> None:
        self._under_way.discard(task)
        self._done.append(task)
        self._news.set()

    async def finished(self, timeout_s: float, *, all_of_them: bool = False) -> "list[asyncio.Future[Answer]]":
        """Rows that are done and were not returned yet. Waits for at least one, or with `all_of_them` for all, but at
        most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._done or (all_of_them and len(self._done) < self.left):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        done, self._done = self._done, []
        self.left -= len(done)
        return done

    async def close(self) -> None:
        """Drops waiting rows and cancels running ones; returns when those have ended."""
        self._slots.drop(self.share, self)
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for task in self._done:
            task.cancelled() or task.exception()  # read, so that asyncio does not log it as never retrieved


class EngineSlots:
    """Starts rows as others end: training first, then evaluation, then others; callers take turns.

    Training may start SURPLUS rows per slot. Other purposes leave training its reserve, and a foreign caller gets no
    more than its share: running rows are never interrupted, so room has to be kept free. While a run holds the
    engine, all foreign callers together get no more than `guests` allow.
    """

    def __init__(self, count: int, limits: LimitsConfig, quantum: int, guests: Guests | None = None) -> None:
        """
        Args:
            count: slots, the rows that the engine processes at a time.
            limits: the shares of the slots.
            quantum: tokens added to a caller's credit in each round; at least the longest row's.
            guests: the foreign callers' part of the engine; None for no limit.
        """
        self._count = count
        self._guests = guests or Guests(1.0, lambda: False)
        self._most = {purpose: max(int((1 - limits.training_reserve) * count), 1) for purpose in Purpose}
        self._most[Purpose.TRAINING] = SURPLUS * count
        self._each = max(int(limits.caller_share * count), 1)
        self._queue: FairQueue[Running[object]] = FairQueue(quantum)
        self._running: Counter[Share] = Counter()
        self._filling: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Looks again for guests whose time has come."""

    def enter(
        self, share: Share, costs: NDArray[np.int32], start: Callable[[int], Awaitable[Answer]]
    ) -> Running[Answer]:
        """Queues the rows of a call. The caller has to close the result.

        Args:
            share: the caller's share.
            costs: [B] tokens of each row.
            start: processes a row, given its index.
        """
        running = Running(self, share, len(costs), start)
        self._queue.add(share, running, costs)  # type: ignore[arg-type]  # calls differ in the type of their answers
        self._fill()
        return running

    def drop(self, share: Share, running: Running[Answer]) -> None:
        """Drops the waiting rows of a call."""
        self._queue.drop(share, running)  # type: ignore[arg-type]

    def _fill(self) -> None:
        if self._filling is None:
            self._filling = asyncio.ensure_future(self._begin())

    async def _begin(self) -> None:
        try:
            begun = 0
            while (purpose := self._queue.next_purpose(self._open())) is not None:
                [part] = self._queue.take(purpose, _ANY_NUMBER, 1)
                self._start(part.call, int(part.rows[0]))
                begun += 1
                if begun % BURST == 0:
                    await asyncio.sleep(0)
        finally:
            self._filling = None
        if self._queue and self._timer is None and (wait_s := self._guests.wait_s):
            self._timer = asyncio.get_running_loop().call_later(min(wait_s, LOOK_S), self._look)

    def _look(self) -> None:
        self._timer = None
        self._fill()

    def _open(self) -> tuple[Purpose, ...]:
        """Purposes that may start another row."""
        others = sum(count for share, count in self._running.items() if share.purpose is not Purpose.TRAINING)
        total = self._running.total()
        guests = self._pass_time()
        welcome = not self._guests.wait_s and guests < self._guests.most(self._count, guests, total)
        return tuple(
            purpose
            for purpose in Purpose
            if (total if purpose is Purpose.TRAINING else others) < self._most[purpose]
            and total < self._most[Purpose.TRAINING]
            and (welcome or purpose is not Purpose.FOREIGN)
        )

    def _pass_time(self) -> int:
        """Has the guests charged for the time that has passed; returns the number of their rows."""
        guests = sum(count for share, count in self._running.items() if share.purpose is Purpose.FOREIGN)
        self._guests.pass_time(guests, max(guests, min(self._running.total(), self._count)))
        return guests

    def _start(self, running: Running[object], row: int) -> None:
        share = running.share
        task = asyncio.ensure_future(running.start(row))
        self._pass_time()
        if share.purpose is Purpose.FOREIGN:
            self._guests.begin()
        self._running[share] += 1
        task.add_done_callback(lambda _: self._end(share))
        running.begun(task)
        if share.purpose is Purpose.FOREIGN and self._running[share] >= self._each:
            self._queue.pause(share)

    def _end(self, share: Share) -> None:
        self._pass_time()
        self._running[share] -= 1
        if not self._running[share]:
            del self._running[share]
        self._queue.resume(share)
        self._fill()
