"""The calls that are open at the ports of a proxy and the bytes of their requests, counted by caller, so that none
keeps the others out."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quartet.security.identity import Caller
from quartet.security.policy import Limits
from quartet.wire.errors import ResourceExhausted

PAUSE_S = 1.0
"""Pause that a refused caller is asked to make."""


class OpenCalls:
    """Counts open calls, from a caller's admission to the end of the reply, and refuses those beyond its share.

    gRPC counts all calls together: one caller that holds the most that may be open, by requests that it does not send
    or replies that it does not read, would keep all others out. The bytes of requests are counted likewise, from
    their arrival to the end of the reply. gRPC tells of a request only once it is whole: over gRPC, a connection and
    a caller have only so many requests received at a time.
    """

    def __init__(self, limits: Callable[[], Limits]) -> None:
        """
        Args:
            limits: returns the current limits.
        """
        self._limits = limits
        self._calls, self._bytes = _Shares("open calls"), _Shares("bytes of unanswered requests")
        self._turns: dict[tuple[str, ...], tuple[asyncio.Semaphore, int]] = {}

    def begin(self, caller: Caller) -> Callable[[object], None]:
        """Counts a call; returns the function to call, with any argument, when the call is over.

        Raises:
            ResourceExhausted: the caller has its share of open calls, or those without the role trainer have theirs.
        """
        limits = self._limits()
        return self._calls.take(caller, 1, limits.concurrent_calls, limits)

    @asynccontextmanager
    async def receiving(self, caller: Caller, connection: str, *, small: bool) -> AsyncIterator[None]:
        """The turn in which a request of this caller is received over gRPC.

        A program that begins requests and does not end them keeps its own connection waiting: its large requests have
        a quarter of the caller's turns, and a trainer's small ones never wait for those of another connection.

        Args:
            caller: who sends it.
            connection: address of the connection's other end.
            small: whether the method's requests hold no data, as those of Info and Claim.
        """
        most = self._limits().receiving
        kind = "small" if small else "large"
        async with self._turn((caller.name, connection, kind), most if small else math.ceil(most / 4)):
            if small and caller.role == "trainer":
                yield
            else:
                async with self._turn((caller.name,), most):
                    yield

    @asynccontextmanager
    async def _turn(self, key: tuple[str, ...], most: int) -> AsyncIterator[None]:
        """One of `most` turns at a time under a key, which is forgotten when it has none left."""
        turns, users = self._turns.get(key) or (asyncio.Semaphore(most), 0)
        self._turns[key] = turns, users + 1
        try:
            async with turns:
                yield
        finally:
            turns, users = self._turns.pop(key)
            if users > 1:
                self._turns[key] = turns, users - 1

    def hold(self, caller: Caller, size: int) -> Callable[[object], None]:
        """Counts `size` bytes of a request; returns what `begin` returns, and raises likewise."""
        limits = self._limits()
        return self._bytes.take(caller, size, limits.unanswered_bytes, limits)


class _Shares:
    """Amounts of something that callers hold, in all and each."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: Counter[str] = Counter()
        self._total = self._beside_training = 0

    def take(self, caller: Caller, amount: int, most: int, limits: Limits) -> Callable[[object], None]:
        trainer = caller.role == "trainer"
        # Without identities all callers are one, and a share would only keep it from the rest.
        own = most if caller.anonymous else int(limits.caller_share * most)
        beside = int((1 - limits.training_reserve) * most)
        checks = [(self._held[caller.name], own, f"{caller.name} has"), (self._total, most, "all callers have")]
        if not trainer:
            checks.append((self._beside_training, beside, "callers without the role trainer have"))
        for held, limit, who in checks:
            if held + amount > limit:
                raise ResourceExhausted(f"{who} {held} {self._what}, and the most is {limit}", PAUSE_S)
        self._count(caller.name, amount, trainer=trainer)
        return lambda _: self._count(caller.name, -amount, trainer=trainer)

    def _count(self, name: str, change: int, *, trainer: bool) -> None:
        self._held[name] += change
        if not self._held[name]:
            del self._held[name]
        self._total += change
        self._beside_training += 0 if trainer else change
