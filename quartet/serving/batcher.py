"""Dynamic batching: calls that arrive while the model computes one pass are queued for the next passes."""

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quartet.serving.fair_queue import FairQueue, Slice
from quartet.serving.share import Share
from quartet.threads import DaemonThread
from quartet.wire.callers import Purpose
from quartet.wire.errors import Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)
Given = TypeVar("Given", contravariant=True)

MOST_ROWS = 1024
"""Most rows of one pass, however short: the model's input for a row takes far more memory than a short row itself."""
MODEL_HANGS = "the model of this replica hangs; the replica will be replaced"
CHECK_S = 10.0
TESTED_S = 10.0
"""Time for which a model that has answered counts as working, in seconds; a test reads all weights on the device."""


class Work(Protocol[Made, Given]):
    """The rows of one call. Its methods run in the batcher's thread, for the rows of one pass at a time."""

    costs: NDArray[np.int32]
    """[B] tokens of each row."""

    def items(self, rows: Sequence[int]) -> Sequence[Made]:
        """The model's inputs for these rows; raises if a row is wrong."""

    def put(self, rows: Sequence[int], results: Sequence[Given]) -> None:
        """Stores the model's results for these rows."""


class SpoiltError(Exception):
    """Some row makes the model fail. Its pass is divided until that row is alone, and then has this result."""

    def __init__(self, result: Any) -> None:
        super().__init__(str(result))
        self.result = result


@dataclass(eq=False, slots=True)
class _Call(Generic[Item, Result]):
    share: Share
    work: Work[Item, Result]
    left: int
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def finish(self, rows: int) -> None:
        """Counts rows as done."""
        self.left -= rows
        if self.left <= 0 and not self.answer.done():
            self.answer.set_result(None)

    def fail(self, error: Exception) -> None:
        """Answers the call with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


_Part = Slice[_Call[Item, Result]]


class Batcher(Generic[Item, Result]):
    """Runs a function of many items for many callers, in passes of at most `batch_tokens` tokens.

    A pass starts as soon as the last one ends, with the rows that wait by then, in the order of FairQueue. Thus a
    call to an idle service never waits for others, and a busy service forms large batches by itself.

    A pass that fails is divided in two until the calls that make it fail are alone, with SpoiltError until the rows
    are, by passes with deadlines of their own. When nothing but SpoiltError has come for as long as a pass may take,
    no pass is divided, as its rows hardly differ: all have the error's result, until a pass succeeds. A pass that
    exceeds its deadline counts as hung, and with it the model's thread: all calls, present and later, are answered
    with Unavailable.

    For example, calls A, B and C wait and B's rows make the model fail. The pass ABC fails, then A succeeds and BC
    fails, then B alone fails and C succeeds: only B gets the error.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Any],
        *,
        batch_tokens: int,
        batch_s: float,
        turn: AbstractAsyncContextManager[Any] | None = None,
        check_s: float = CHECK_S,
    ) -> None:
        """
        Args:
            run: returns a sequence or array of one result per item, in order; never runs twice at the same time.
                Either a coroutine function, or a plain one, which runs in a separate thread.
            batch_tokens: most tokens in one pass; a longer row is a pass of its own.
            batch_s: deadline of a pass, in seconds.
            turn: context held from the choice of a pass to its end; the deadline begins within it.
            check_s: longest time, in seconds, that an idle model may take to answer a health check.
        """
        self._thread = thread = DaemonThread("batcher")
        self._run: Callable[[Sequence[Item]], Awaitable[Any]] = (
            run
            if inspect.iscoroutinefunction(run)
            else lambda items: asyncio.get_running_loop().run_in_executor(thread, run, items)
        )
        self._batch_tokens, self._batch_s, self._check_s = batch_tokens, batch_s, check_s
        self._turn: AbstractAsyncContextManager[Any] = turn or nullcontext()
        self._queue: FairQueue[_Call[Item, Result]] = FairQueue(quantum=max(batch_tokens // 8, 1))
        self._open: set[_Call[Item, Result]] = set()
        self._working: asyncio.Task[None] | None = None
        self._began: float | None = None
        self._spoilt_s = 0.0
        self._content = self._hung = ""
        self._answered = -math.inf

    async def submit(self, share: Share, work: Work[Item, Result]) -> None:
        """Returns when `work` has the results of all its rows. Cancelling drops the rows that no pass has begun.

        Raises:
            Unavailable: the model hangs.
            Exception: an error of `run` or of the work.
        """
        if self._hung:
            raise Unavailable(MODEL_HANGS)
        if not len(work.costs):
            return
        call = _Call(share, work, len(work.costs))
        self._open.add(call)
        self._queue.add(share, call, work.costs)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        try:
            await call.answer
        finally:
            self._open.discard(call)
            if call.left > 0:
                self._queue.drop(share, call)

    def check(self) -> None:
        """Raises RuntimeError, which names the pass and its duration, once a pass has exceeded its deadline."""
        if self._hung:
            raise RuntimeError(f"{self._hung}; now {self._seconds:.0f} s")
        if self._seconds > self._batch_s:
            raise RuntimeError(self._overdue)

    async def check_health(self, check: Callable[[], None]) -> None:
        """Raises unless the model works. A model that computes is judged by the deadline of its pass; an idle one by
        `check`, which must be quick, unless it answered in the last TESTED_S. The length of the queue is ignored."""
        self.check()
        if self._working is None and time.monotonic() - self._answered >= TESTED_S:
            async with asyncio.timeout(self._check_s):
                await asyncio.get_running_loop().run_in_executor(self._thread, check)
            self._answered = time.monotonic()

    @property
    def _seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def _overdue(self) -> str:
        return f"{self._content} has run for {self._seconds:.0f} s, longer than batch_s, {self._batch_s:g} s"

    async def _work(self) -> None:
        try:
            while self._queue and not self._hung:
                async with self._turn:
                    purpose = self._queue.next_purpose()
                    if purpose is not None:
                        await self._pass(purpose, self._queue.take(purpose, self._batch_tokens, MOST_ROWS))
        finally:
            self._working = None
            for call in list(self._open):
                call.fail(Unavailable(MODEL_HANGS if self._hung else "this replica stops"))

    async def _pass(self, purpose: Purpose, parts: list[_Part[Item, Result]]) -> None:
        parts = [part for part in parts if not part.call.answer.done()]
        if not parts:
            return
        self._began, self._content = time.monotonic(), _described(parts)
        computing = asyncio.ensure_future(self._compute(parts))
        done, _ = await asyncio.wait({computing}, timeout=self._batch_s)
        if not done:
            self._hung = self._overdue
            return
        took_s, self._began = self._seconds, None
        error = RuntimeError("the pass was cancelled") if computing.cancelled() else computing.exception()
        self._spoilt_s = self._spoilt_s + took_s if isinstance(error, SpoiltError) else 0.0
        if isinstance(error, Exception):
            self._answered = -math.inf
            await self._divide(purpose, parts, error)

    async def _divide(self, purpose: Purpose, parts: list[_Part[Item, Result]], error: Exception) -> None:
        """Divides a failed pass in two; a call that fails alone is answered with the error, a row with its result."""
        if isinstance(error, SpoiltError):
            rows = sum(len(part.rows) for part in parts)
            if rows == 1 or self._spoilt_s > self._batch_s:
                await self._put(parts, [error.result] * rows)
                return
            if len(parts) == 1:
                parts = _halves(parts[0])
        if len(parts) == 1:
            parts[0].call.fail(error)
            return
        middle = len(parts) // 2
        self._queue.again(purpose, parts[middle:])
        self._queue.again(purpose, parts[:middle])

    async def _compute(self, parts: list[_Part[Item, Result]]) -> None:
        items = await asyncio.get_running_loop().run_in_executor(self._thread, _items, parts)
        right = [(part, made) for part, made in zip(parts, items, strict=True) if not isinstance(made, Exception)]
        for part, made in zip(parts, items, strict=True):
            if isinstance(made, Exception):
                part.call.fail(made)
        if not right:
            return
        results = await self._run([item for _, made in right for item in made])
        self._answered = time.monotonic()
        await self._put([part for part, _ in right], results)

    async def _put(self, parts: list[_Part[Item, Result]], results: Sequence[Result]) -> None:
        """Stores the results of these parts in their calls."""
        put = await asyncio.get_running_loop().run_in_executor(self._thread, _put, parts, results)
        for part, error in put:
            if error is None:
                part.call.finish(len(part.rows))
            else:
                part.call.fail(error)


def _halves(part: _Part[Item, Result]) -> list[_Part[Item, Result]]:
    """The rows of a part, at least two, in two parts."""
    middle = len(part.rows) // 2
    halves = (part.rows[:middle], part.rows[middle:])
    return [Slice(part.call, rows, int(part.call.work.costs[rows].sum())) for rows in halves]


def _described(parts: Sequence[_Part[Any, Any]]) -> str:
    names = sorted({part.call.share.name for part in parts})
    rows, tokens = sum(len(part.rows) for part in parts), sum(part.tokens for part in parts)
    return f"a batch of {rows} rows and {tokens} tokens for {', '.join(names[:8])}"


def _items(parts: Sequence[_Part[Item, Any]]) -> list[Sequence[Item] | Exception]:
    """The model's inputs for each part, or the error in the part."""
    made: list[Sequence[Item] | Exception] = []
    for part in parts:
        try:
            made.append(part.call.work.items(part.rows.tolist()))
        except Exception as error:
            made.append(error)
    return made


def _put(
    parts: Sequence[_Part[Any, Result]], results: Sequence[Result]
) -> list[tuple[_Part[Any, Result], Exception | None]]:
    """Stores results in their calls; returns each part with its error, if any."""
    rows = sum(len(part.rows) for part in parts)
    if len(results) != rows:
        raise RuntimeError(f"{len(results)} results for {rows} rows")
    put: list[tuple[_Part[Any, Result], Exception | None]] = []
    start = 0
    for part in parts:
        end = start + len(part.rows)
        try:
            part.call.work.put(part.rows.tolist(), results[start:end])
            put.append((part, None))
        except Exception as error:
            put.append((part, error))
        start = end
    return put
