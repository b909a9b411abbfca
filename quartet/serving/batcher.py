"""Dynamic batching: calls that arrive while the model computes one pass are queued for the next passes."""

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quartet.serving.fair_queue import FairQueue, Slice
from quartet.serving.restraint import Restraint
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


class HungError(Exception):
    """The model hangs; the text says for how long. For a `run` that knows how long the model itself has computed."""


class SpoiltError(Exception):
    """Some row makes the model fail. Its pass is divided until that row is alone, and then has this result."""

    def __init__(self, result: Any, suspect: int | None = None) -> None:
        """`suspect` is the index of the item that is probably the cause: the others are tried without it, and then it
        alone. Wrong guesses cost passes, and no item its result."""
        super().__init__(str(result))
        self.result = result
        self.suspect = suspect


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


@dataclass(eq=False, slots=True)
class _Running:
    """A pass that computes, and when it began."""

    content: str
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def seconds(self) -> float:
        """The time so far."""
        return time.monotonic() - self.began


class Batcher(Generic[Item, Result]):
    """Runs a function of many items for many callers, in passes of at most `batch_tokens` tokens.

    A pass starts as soon as the last one ends, with the rows that wait by then, in the order of FairQueue. Thus a
    call to an idle service never waits for others, and a busy service forms large batches by itself.

    A pass that fails is divided in two until the calls that make it fail are alone, with SpoiltError until the rows
    are, by passes with deadlines of their own; its caller then has its part of the passes and no more (Restraint).
    When nothing but SpoiltError has come for a caller's rows for `patience_s`, no pass of them is divided, as they
    hardly differ: all have the error's result, until a pass succeeds. A pass that exceeds its deadline counts as
    hung, and with it the model: all calls, present and later, are answered with Unavailable.

    For example, calls A, B and C wait and B's rows make the model fail. The pass ABC fails, then A succeeds and BC
    fails, then B alone fails and C succeeds: only B gets the error.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Any],
        *,
        batch_tokens: int,
        batch_s: float,
        passes: int = 1,
        patience_s: float | None = None,
        turn: AbstractAsyncContextManager[Any] | None = None,
        check_s: float = CHECK_S,
    ) -> None:
        """
        Args:
            run: returns a sequence or array of one result per item, in order. Either a coroutine function, or a plain
                one, which runs in a separate thread.
            batch_tokens: most tokens in one pass; a longer row is a pass of its own.
            batch_s: deadline of a pass, in seconds; infinite if `run` ends by itself.
            passes: most passes at the same time.
            patience_s: time without a pass of a caller's that succeeds after which none is divided, in seconds; None:
                `batch_s`.
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
        self._passes = passes
        self._patience_s = batch_s if patience_s is None else patience_s
        self._turn: AbstractAsyncContextManager[Any] = turn or nullcontext()
        self._queue: FairQueue[_Call[Item, Result]] = FairQueue(quantum=max(batch_tokens // 8, 1))
        self._open: set[_Call[Item, Result]] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._running: set[_Running] = set()
        self._restraint = Restraint(passes, self._patience_s)
        self._hung = ""
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
        self._restraint.seen(share, time.monotonic())
        self._queue.add(share, call, work.costs)
        self._work_on()
        try:
            await call.answer
        finally:
            self._open.discard(call)
            if call.left > 0:
                self._queue.drop(share, call)

    def check(self) -> None:
        """Raises RuntimeError, which names the pass and its duration, once a pass has exceeded its deadline."""
        if self._hung:
            raise RuntimeError(f"{self._hung}; now {self._longest.seconds if self._longest else 0:.0f} s")
        if (running := self._longest) is not None and running.seconds > self._batch_s:
            raise RuntimeError(self._overdue(running))

    async def check_health(self, check: Callable[[], None]) -> None:
        """Raises unless the model works. A model that computes is judged by the deadline of its pass; an idle one by
        `check`, which must be quick, unless it answered in the last TESTED_S. The length of the queue is ignored."""
        self.check()
        if not self._working and time.monotonic() - self._answered >= TESTED_S:
            async with asyncio.timeout(self._check_s):
                await asyncio.get_running_loop().run_in_executor(self._thread, check)
            self._answered = time.monotonic()

    @property
    def _longest(self) -> _Running | None:
        """The pass that began first."""
        return min(self._running, key=lambda running: running.began, default=None)

    def _overdue(self, running: _Running) -> str:
        return f"{running.content} has run for {running.seconds:.0f} s, longer than batch_s, {self._batch_s:g} s"

    def _work_on(self) -> None:
        """Starts one more series of passes if something waits and one more is allowed."""
        if self._queue and not self._hung and len(self._working) < self._passes:
            self._working.add(asyncio.create_task(self._work()))

    async def _work(self) -> None:
        served = False
        try:
            while self._queue and not self._hung:
                async with self._turn:
                    purpose = self._queue.next_purpose()
                    if purpose is not None:
                        parts = self._queue.take(purpose, self._batch_tokens, MOST_ROWS, self._apart)
                        self._work_on()
                        await self._pass(purpose, parts)
            served = not self._hung
        finally:
            self._working -= {asyncio.current_task()}
            if not served:
                for call in list(self._open):
                    call.fail(Unavailable(MODEL_HANGS if self._hung else "this replica stops"))

    async def _pass(self, purpose: Purpose, parts: list[_Part[Item, Result]]) -> None:
        parts = [part for part in parts if not part.call.answer.done()]
        if not parts:
            return
        running = _Running(_described(parts))
        self._running.add(running)
        shares = {part.call.share for part in parts}
        self._restraint.begins(shares, time.monotonic())
        self._restrain(shares)
        computing = asyncio.ensure_future(self._compute(parts))
        done, _ = await asyncio.wait({computing}, timeout=None if math.isinf(self._batch_s) else self._batch_s)
        if not done:
            self._hung = self._overdue(running)
            return
        error = RuntimeError("the pass was cancelled") if computing.cancelled() else computing.exception()
        if isinstance(error, HungError):
            self._hung = str(error)
            return
        self._running.discard(running)
        self._restraint.ends(shares, running.seconds if isinstance(error, SpoiltError) else None)
        if isinstance(error, Exception):
            self._answered = -math.inf
            await self._divide(purpose, parts, error, running.seconds)
        self._restrain(shares)

    def _restrain(self, shares: Iterable[Share]) -> None:
        """Passes over the callers that may begin no other pass now, and over no others of these."""
        for share in shares:
            wait_s = self._restraint.wait_s(share, time.monotonic())
            if not wait_s:
                self._queue.resume(share)
                continue
            self._queue.pause(share)
            if math.isfinite(wait_s):
                asyncio.get_running_loop().call_later(wait_s, self._restrain, [share])
        self._work_on()

    async def _divide(
        self, purpose: Purpose, parts: list[_Part[Item, Result]], error: Exception, seconds: float
    ) -> None:
        """Divides a pass that failed after so many seconds; a call that fails alone is answered with the error, a row
        with its result."""
        pieces = [parts[: len(parts) // 2], parts[len(parts) // 2 :]]
        if isinstance(error, SpoiltError):
            before, rest = _cut(parts, error.suspect or 0)
            suspect, after = _cut(rest, 1)
            to_blame = {part.call.share for part in (parts if error.suspect is None else suspect)}
            if len(to_blame) == 1:
                self._restraint.spoils(to_blame.pop(), seconds, time.monotonic())
            rows = _rows(parts)
            if rows == 1 or all(self._restraint.in_vain(part.call.share) for part in parts):
                await self._put(parts, [error.result] * rows)
                return
            if error.suspect is not None:
                pieces = [*_halved(before), *_halved(after), suspect]
            elif len(parts) == 1:
                pieces = _halved(parts)
        elif len(parts) == 1:
            parts[0].call.fail(error)
            return
        for piece in reversed(pieces):
            for share, own in self._by_caller(piece).items():
                self._queue.again(purpose, own, share)

    def _by_caller(self, parts: list[_Part[Item, Result]]) -> dict[Share | None, list[_Part[Item, Result]]]:
        """The parts of each caller whose rows spoil passes, and at None those of all others."""
        found: dict[Share | None, list[_Part[Item, Result]]] = {}
        for part in parts:
            share = part.call.share
            found.setdefault(share if self._apart(share) else None, []).append(part)
        return found

    def _apart(self, share: Share) -> bool:
        return self._restraint.apart(share, time.monotonic())

    async def _compute(self, parts: list[_Part[Item, Result]]) -> None:
        items = await asyncio.get_running_loop().run_in_executor(self._thread, _items, parts)
        right = [(part, made) for part, made in zip(parts, items, strict=True) if not isinstance(made, Exception)]
        for part, made in zip(parts, items, strict=True):
            if isinstance(made, Exception):
                part.call.fail(made)
        parts[:] = [part for part, _ in right]  # in whose rows an error's suspect is counted
        if not right:
            return
        results = await self._run([item for _, made in right for item in made])
        self._answered = time.monotonic()
        await self._put(parts, results)

    async def _put(self, parts: list[_Part[Item, Result]], results: Sequence[Result]) -> None:
        """Stores the results of these parts in their calls."""
        put = await asyncio.get_running_loop().run_in_executor(self._thread, _put, parts, results)
        for part, error in put:
            if error is None:
                part.call.finish(len(part.rows))
            else:
                part.call.fail(error)


def _rows(parts: Sequence[_Part[Any, Any]]) -> int:
    return sum(len(part.rows) for part in parts)


def _halved(parts: list[_Part[Item, Result]]) -> list[list[_Part[Item, Result]]]:
    """The two halves of the rows of some parts."""
    return [*_cut(parts, _rows(parts) // 2)]


def _cut(parts: list[_Part[Item, Result]], rows: int) -> tuple[list[_Part[Item, Result]], list[_Part[Item, Result]]]:
    """The first `rows` rows, and the others."""
    first: list[_Part[Item, Result]] = []
    others: list[_Part[Item, Result]] = []
    for part in parts:
        here = min(rows, len(part.rows))
        for side, kept in ((first, part.rows[:here]), (others, part.rows[here:])):
            if len(kept):
                side.append(Slice(part.call, kept, int(part.call.work.costs[kept].sum())))
        rows -= here
    return first, others


def _described(parts: Sequence[_Part[Any, Any]]) -> str:
    names = sorted({part.call.share.name for part in parts})
    rows, tokens = _rows(parts), sum(part.tokens for part in parts)
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
    rows = _rows(parts)
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
