"""The pulse of an engine: whether its process still answers, for callers that wait for samples."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from quartet.wire.errors import Unavailable

STILL_S = 6.0
"""Seconds after which an engine that has not answered counts as one that stands still. It answers between two of its
steps, so that it is longer where steps are."""
BEAT_S = 2.5
"""Most seconds between two beats that count as the engine's. Where more pass, this process's own event loop was busy,
and could not have read an answer; or no call waited."""
FACTOR = 3.0
"""Multiple of the slowest of the last answers that an engine gets at least. A step that is as long as no other before
ends the calls once; the next ones have its length to go by, and do not end in it again."""
REMEMBERED = 16
"""Answers whose durations are kept."""


class Pulse:
    """Asks an engine the simplest question at each beat, one at a time.

    A process that stands still closes no connection, and its replica, which is well, would go on telling callers that
    their samples are being made. With Serve's health checks that ends after half a minute only.
    """

    def __init__(self, ask: Callable[[], Awaitable[None]], busy: Callable[[], bool]) -> None:
        """
        Args:
            ask: returns when the engine has answered, however long it takes, and raises if it is dead.
            busy: True while the engine is in a phase of a push, which has a deadline of its own.
        """
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._ask, self._busy = ask, busy
        self._question: asyncio.Future[None] | None = None
        self._since = self._beat = 0.0

    def beat(self) -> None:
        """Asks again if the last question was answered.

        Raises:
            Unavailable: the last question has been open for too long, or the engine is dead.
        """
        now = asyncio.get_running_loop().time()
        dead = None
        if self._question is None or self._question.done():
            dead = self._question and self._question.exception()
            self._question, self._since = asyncio.ensure_future(self._ask()), now
            self._question.add_done_callback(self._answered)
        elif self._busy():
            self._since = now
        else:
            self._since += max(now - self._beat - BEAT_S, 0.0)
        self._beat = now
        if dead or now - self._since > max(STILL_S, FACTOR * max(self._took, default=0.0)):
            raise Unavailable("the engine of this replica does not answer")

    def _answered(self, question: "asyncio.Future[None]") -> None:
        self._took.append(asyncio.get_running_loop().time() - self._since)
