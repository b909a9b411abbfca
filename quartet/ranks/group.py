"""The ranks of a learner as one: every call goes to all of them, and fails if one of them fails."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, TypeVarTuple, cast

from quartet.ranks.ranks import Ranks
from quartet.threads import in_thread
from quartet.wire.errors import DeadlineExceeded, Internal, ResourceExhausted, ServiceError

GRACE_S = 5.0
"""Seconds that the other ranks may take to finish after one rank failed; then they count as stuck."""
LOOK_S = 0.5
"""Seconds between two looks at the processes whose answer is awaited."""
STOPPED_LOOKS = 6
"""Looks in a row that find a process stopped by a signal, after which it counts as dead. Looks are counted and not
seconds, since this process may have been stopped meanwhile too."""


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Given = TypeVarTuple("Given")
Value = TypeVar("Value")
Method = Callable[Concatenate[Any, Arguments], Answer]
"""A method of a trainer, or of one of its parts, as written in its class: `PolicyTrainer.train`."""


class RankDied(RuntimeError):
    """A rank's process is gone. Raised by what RankProcess.call returns."""


class RankFailed(Internal):
    """A rank's method raised something other than a ServiceError. The text may hold anything and is kept off the
    network."""


class RanksLost(RuntimeError):
    """The group has ended because a rank died or is stuck, and with it the training that is in no checkpoint. The
    message names the rank."""


class RankProcess(Protocol):
    """A `ranks.Rank` in a process of its own."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Sends the call at once, so that calls arrive in the order in which they are made.

        The awaitable returns the answer, or raises RankDied or the method's own error.
        """

    @property
    def death(self) -> str:
        """The way in which the process ended; empty while it lives, or where only a call would tell."""

    @property
    def stopped(self) -> bool:
        """True while the process is stopped by a signal such as SIGSTOP; False also where that cannot be seen. One
        that computes, loads or waits is not stopped, however long it takes."""

    def kill(self) -> bool:
        """Ends the process at once; does nothing if it has ended. False if it goes on, as a thread does in a call."""


StoreOnce = Callable[[Any], Any]
"""Stores a value once for all ranks, in a thread. What it returns stands for the value in a call: each rank fetches
it."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A value that is stored before the call that it is an argument of."""

    value: Any


class RankGroup:
    """Drives the ranks of one learner. Calls take turns.

    Ranks meet in collectives, so one that fails leaves the others waiting for it. Its failure therefore ends the
    call; it ends the group too if a rank died or is stuck. Then all processes are killed, and every later call
    raises RanksLost at once.
    """

    def __init__(
        self, name: str, ranks: Sequence[RankProcess], grace_s: float = GRACE_S, store: StoreOnce | None = None
    ) -> None:
        """Takes over the processes. Each error begins with `name`. Without `store` ranks get every value with the
        call."""
        self._name, self._store = name, store
        self._ranks = ranks
        self._grace_s = grace_s
        self._turn = asyncio.Lock()
        self._lost = ""
        self.goes_on = False
        """True if the group has ended, but a rank could not be: it goes on with its call, and keeps its model."""

    def share(self, value: Value) -> Value:
        """A large value, such as a batch, as an argument of `call`, which stores it once for all ranks."""
        return value if self._store is None else cast(Value, _Shared(value))

    async def start(self, build: Callable[[*Given, Ranks], object], *arguments: *Given, timeout_s: float) -> None:
        """Connects the ranks with one another and builds their trainers: `build(*arguments, ranks)`.

        Raises:
            ResourceExhausted: it took longer than `timeout_s`, usually because the cluster lacks CPUs or GPUs, or its
                head is overloaded.
            RanksLost: a rank died meanwhile.
            ServiceError: the error of `build`, as for `call`. In each case the group has ended.
        """
        began = time.monotonic()
        try:
            async with self._turn:
                (address,) = await self._ask(self._ranks[:1], "start", timeout_s, False, "open")
                left = timeout_s - (time.monotonic() - began)
                await self._ask(self._ranks, "start", left, False, "start", address, build, *arguments)
        except DeadlineExceeded as error:
            self._end(str(error))
            raise ResourceExhausted(
                f"{error}; does the cluster have the CPUs and GPUs that all ranks ask for, and does its head answer?"
            ) from None
        except ServiceError as error:
            self._end(str(error))
            raise

    async def call(
        self,
        method: Method[Arguments, Answer],
        timeout_s: float,
        /,
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Answer:
        """Runs a method of the trainer on all ranks; returns rank 0's answer.

        Raises:
            RanksLost: a rank died, did not answer within `timeout_s`, or did not finish after another failed. The
                group has ended.
            ServiceError: the method's error; RankFailed, which names rank and error, for any other type of error.
        """
        async with self._turn:
            what, given = method.__name__, await self._stored(method.__name__, timeout_s, arguments)
            answers: list[Answer] = await self._ask(
                self._ranks, what, timeout_s, True, "run", method.__qualname__, *given, **options
            )
        return answers[0]

    async def _stored(self, what: str, timeout_s: float, arguments: Sequence[Any]) -> list[Any]:
        """The arguments, the shared ones stored. RanksLost if that takes longer than `timeout_s`."""
        given, store = [*arguments], self._store
        try:
            async with asyncio.timeout(timeout_s) as limit:
                for place, each in enumerate(given):
                    if isinstance(each, _Shared) and store is not None:
                        # In a thread, as the node's raylet may take long to answer, and the loop has leases to renew.
                        given[place] = await in_thread(partial(store, each.value), f"{self._name} argument")
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._end(f"{self._name}.{what}: its argument was not stored within {timeout_s:g} s") from None
        return given

    async def beside(
        self,
        count: int,
        method: Method[Arguments, Answer],
        timeout_s: float,
        /,
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> list[Answer]:
        """Runs a method without collectives on the first `count` ranks, in another thread beside the call in
        progress; returns each rank's answer. Raises as `call` does, but a deadline does not end the group:
        DeadlineExceeded."""
        return await self._ask(
            self._ranks[:count],
            method.__name__,
            timeout_s,
            False,
            "run_beside",
            method.__qualname__,
            *arguments,
            **options,
        )

    def check(self) -> None:
        """Raises RanksLost if the group has ended. A rank that died between two calls ends it."""
        for rank, process in enumerate(self._ranks):
            if not self._lost and process.death:
                self._end(f"{self._name}: rank {rank} of {len(self._ranks)} died: {process.death}")
        if self._lost:
            raise RanksLost(self._lost)

    def stop(self) -> None:
        """Ends all processes."""
        self._end(f"{self._name}: stopped")

    async def _ask(
        self,
        ranks: Sequence[RankProcess],
        what: str,
        timeout_s: float,
        ends: bool,
        method: str,
        *arguments: Any,
        **options: Any,
    ) -> list[Any]:
        self.check()
        calls = [asyncio.ensure_future(rank.call(method, *arguments, **options)) for rank in ranks]
        for call in calls:
            call.add_done_callback(_noted)
        waiting = await self._answered(calls, ranks, what, timeout_s)
        failures = _failures(calls)
        if failures and waiting and not any(isinstance(error, RankDied) for error in failures.values()):
            # A rank whose peer died fails at once, often before the death is known.
            _, waiting = await asyncio.wait(waiting, timeout=self._grace_s)
            failures = _failures(calls)
        stuck = [rank for rank, call in enumerate(calls) if call in waiting]
        if failures or stuck:
            raise self._verdict(f"{self._name}.{what}", failures, stuck, timeout_s, ends)
        return [call.result() for call in calls]

    async def _answered(
        self, calls: Sequence[asyncio.Future[Any]], ranks: Sequence[RankProcess], what: str, timeout_s: float
    ) -> set[asyncio.Future[Any]]:
        """The calls that are open when all others have an answer, one has failed, or time is up. RanksLost if the
        group has ended meanwhile, or if a process is stopped: it would answer none of its calls, and nothing else
        notices."""
        clock = asyncio.get_running_loop().time
        end, looks = clock() + timeout_s, [0] * len(ranks)
        while True:
            left = end - clock()
            done, waiting = await asyncio.wait(calls, timeout=min(left, LOOK_S), return_when=asyncio.FIRST_EXCEPTION)
            if not waiting or left <= LOOK_S or any(call.cancelled() or call.exception() for call in done):
                return waiting
            if self._lost:  # beside this call, which may never be answered now
                raise RanksLost(self._lost)
            looks = [seen + 1 if rank.stopped else 0 for seen, rank in zip(looks, ranks, strict=True)]
            if max(looks) >= STOPPED_LOOKS:
                rank, count = looks.index(max(looks)), len(self._ranks)
                raise self._end(f"{self._name}.{what}: rank {rank} of {count} died: a signal has stopped its process")

    def _verdict(
        self, what: str, failures: dict[int, BaseException], stuck: list[int], timeout_s: float, ends: bool
    ) -> Exception:
        """The error to raise; ends the group if it cannot continue."""
        for rank, error in failures.items():
            if isinstance(error, RankDied):
                return self._end(f"{what}: rank {rank} of {len(self._ranks)} died: {error}")
        if not failures:
            late = f"{what}: no answer within {timeout_s:g} s from {_named(stuck)} of {len(self._ranks)}"
            return self._end(late) if ends or self._lost else DeadlineExceeded(late)
        rank, error = next(iter(failures.items()))
        message = f"{what}: rank {rank} of {len(self._ranks)}: {type(error).__name__}: {error}"
        if stuck:
            return self._end(f"{message}; {_named(stuck)} did not finish after it")
        return error if isinstance(error, ServiceError) else RankFailed(message)

    def _end(self, reason: str) -> RanksLost:
        if not self._lost:
            self._lost = reason
            ended = [rank.kill() for rank in self._ranks]
            self.goes_on = not all(ended)
        return RanksLost(reason)


def _failures(calls: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    """Errors that calls raised so far, by rank."""
    raised = {rank: call.exception() for rank, call in enumerate(calls) if call.done()}
    return {rank: error for rank, error in raised.items() if error is not None}


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _noted(call: asyncio.Future[Any]) -> None:
    """Marks the exception of an abandoned call as seen; asyncio would otherwise log it as never retrieved."""
    if not call.cancelled():
        call.exception()
