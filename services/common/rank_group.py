"""The ranks of a learner as one: every call goes to all of them, and what befalls one befalls the call."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from services.common.errors import DeadlineExceeded, Internal, ServiceError

GRACE_S = 5.0
"""After an error on one rank: how long the others may take to finish before they count as stuck."""


class RankDied(RuntimeError):
    """A rank's process is gone. Raised by RankProcess.call."""


class RankFailed(Internal):
    """What a rank's method raised, if that was no ServiceError. The text may hold anything: not for the network."""


class RanksLost(RuntimeError):
    """The group has ended, because a rank died or is stuck. The message names it."""


class RankProcess(Protocol):
    """A `ranks.Rank` in a process of its own."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Sends the call off at once, so that calls arrive in the order in which they are made.

        The awaitable gives the answer. It raises RankDied, or what the method raised.
        """

    def kill(self) -> None:
        """Ends the process at once; does nothing if it has ended."""


class RankGroup:
    """Drives the ranks of one learner. Calls take turns.

    Ranks meet in collectives, so one that fails leaves the others waiting for it. Its failure therefore ends the
    call; it ends the group too if a rank died or is stuck. Then all processes are killed, and every later call
    raises RanksLost at once.
    """

    def __init__(self, name: str, ranks: Sequence[RankProcess], grace_s: float = GRACE_S) -> None:
        """Takes the processes over. `name` stands at the head of each error."""
        self._name = name
        self._ranks = ranks
        self._grace_s = grace_s
        self._turn = asyncio.Lock()
        self._lost = ""

    async def start(self, build: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        """Has the ranks find one another and build their trainers: `build(*arguments, ranks)`.

        Raises:
            DeadlineExceeded: not within `timeout_s`, usually because the cluster has not the CPUs or GPUs.
            RanksLost: a rank died meanwhile.
            ServiceError: what `build` raised, as for `call`. In each case the group has ended.
        """
        began = time.monotonic()
        try:
            async with self._turn:
                (address,) = await self._ask(self._ranks[:1], "start", timeout_s, "open")
                left = timeout_s - (time.monotonic() - began)
                await self._ask(self._ranks, "start", left, "start", address, build, *arguments)
        except DeadlineExceeded as error:
            self._end(str(error))
            raise DeadlineExceeded(f"{error}; has the cluster the CPUs and GPUs that all ranks ask for?") from None
        except ServiceError as error:
            self._end(str(error))
            raise

    async def call(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        """Runs a method of the trainer on all ranks; rank 0's answer.

        Raises:
            DeadlineExceeded: not all ranks answered within `timeout_s`. The group has ended.
            RanksLost: a rank died, or did not finish after another failed. The group has ended.
            ServiceError: what the method raised; RankFailed, naming rank and error, if that was no ServiceError.
        """
        async with self._turn:
            answers = await self._ask(self._ranks, method, timeout_s, "run", method, *arguments, **options)
        return answers[0]

    async def some(self, count: int, method: str, *arguments: Any, timeout_s: float, **options: Any) -> list[Any]:
        """Like `call`, on the first `count` ranks, for methods in which ranks do not meet; each one's answer.

        Here a deadline does not end the group.
        """
        async with self._turn:
            return await self._ask(
                self._ranks[:count], method, timeout_s, "run", method, *arguments, _ends=False, **options
            )

    async def beside(self, count: int, method: str, *arguments: Any, timeout_s: float, **options: Any) -> list[Any]:
        """Like `some`, but out of turn: the method runs in a thread of its own beside whatever else is running."""
        return await self._ask(
            self._ranks[:count], method, timeout_s, "run_beside", method, *arguments, _ends=False, **options
        )

    def check(self) -> None:
        """Raises RanksLost if the group has ended."""
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
        method: str,
        *arguments: Any,
        _ends: bool = True,
        **options: Any,
    ) -> list[Any]:
        self.check()
        calls = [asyncio.ensure_future(rank.call(method, *arguments, **options)) for rank in ranks]
        for call in calls:
            call.add_done_callback(_noted)
        _, waiting = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failures = _failures(calls)
        if failures and waiting and not any(isinstance(error, RankDied) for error in failures.values()):
            # One whose peer died fails at once, often before the death is known.
            _, waiting = await asyncio.wait(waiting, timeout=self._grace_s)
            failures = _failures(calls)
        stuck = [rank for rank, call in enumerate(calls) if call in waiting]
        if failures or stuck:
            raise self._verdict(f"{self._name}.{what}", failures, stuck, timeout_s, _ends)
        return [call.result() for call in calls]

    def _verdict(
        self, what: str, failures: dict[int, BaseException], stuck: list[int], timeout_s: float, ends: bool
    ) -> Exception:
        """The error to raise; ends the group where it cannot go on."""
        for rank, error in failures.items():
            if isinstance(error, RankDied):
                return self._end(f"{what}: rank {rank} of {len(self._ranks)} died: {error}")
        if not failures:
            late = f"{what}: no answer within {timeout_s:g} s from {_named(stuck)} of {len(self._ranks)}"
            if ends:
                self._end(late)
            return DeadlineExceeded(late)
        rank, error = next(iter(failures.items()))
        message = f"{what}: rank {rank} of {len(self._ranks)}: {type(error).__name__}: {error}"
        if stuck:
            return self._end(f"{message}; {_named(stuck)} did not finish after it")
        return error if isinstance(error, ServiceError) else RankFailed(message)

    def _end(self, reason: str) -> RanksLost:
        if not self._lost:
            self._lost = reason
            for rank in self._ranks:
                rank.kill()
        return RanksLost(reason)


def _failures(calls: Sequence[asyncio.Future[Any]]) -> dict[int, BaseException]:
    """What calls raised so far, by rank."""
    raised = {rank: call.exception() for rank, call in enumerate(calls) if call.done()}
    return {rank: error for rank, error in raised.items() if error is not None}


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _noted(call: asyncio.Future[Any]) -> None:
    """asyncio complains about exceptions that nobody looked at; those of calls given up are nobody's."""
    if not call.cancelled():
        call.exception()
