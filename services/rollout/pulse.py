"""The pulse of an engine: whether its process still answers, for callers that wait for samples."""

import asyncio
from collections.abc import Awaitable, Callable

from services.common.wire.errors import Unavailable

STILL_S = 6.0
"""Seconds after which an engine that has not answered counts as one that stands still. It answers between two of its
steps."""


class Pulse:
    """Asks an engine the simplest question at each beat, one at a time.

    A process that stands still closes no connection, and its replica, which is well, would go on telling callers that
    their samples are being made. With Serve's health checks that ends after half a minute only.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[None]], busy: Callable[[], bool], still_s: float = STILL_S
    ) -> None:
        """
        Args:
            ask: returns when the engine has answered, however long it takes, and raises if it is dead.
            busy: True while the engine is in a phase of a push, which has a deadline of its own.
            still_s: seconds for which a question may be open.
        """
        self._ask, self._busy, self._still_s = ask, busy, still_s
        self._question: asyncio.Future[None] | None = None
        self._since = 0.0

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
        elif self._busy():
            self._since = now
        if dead or now - self._since > self._still_s:
            raise Unavailable("the engine of this replica does not answer")
