"""Hedged calls: a further attempt at another replica while the first attempt has not been answered."""

import asyncio
import statistics
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from quartet.wire.errors import ResourceExhausted, Unavailable

Answer = TypeVar("Answer")

MOST_ATTEMPTS = 3
"""Most attempts of one call at the same time."""
DELAY_FACTOR = 3.0
"""Multiple of the usual answer time after which the next attempt begins."""


class HedgingDelay:
    """The time to wait for an attempt before the next one begins beside it.

    At least `least_s`, and longer if answers usually take longer, so that a busy and therefore slow service is not
    given the same work twice. A service that has become slow counts as slow after its second slow answer: until then
    each call is sent again, and what the service does twice makes it slower still. A single slow answer says nothing.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._recent: deque[float] = deque(maxlen=16)

    def saw(self, seconds: float) -> None:
        """Records the duration of an answered attempt."""
        self._recent.append(seconds)

    def seconds(self, timeout_s: float) -> float:
        """Seconds to wait for one attempt: at most a third of `timeout_s`, the time that the whole call may take."""
        return min(max(self._least_s, DELAY_FACTOR * self._usual_s), timeout_s / MOST_ATTEMPTS)

    @property
    def _usual_s(self) -> float:
        if not self._recent:
            return 0.0
        return max(statistics.median(self._recent), min(list(self._recent)[-2:]))


async def first_answer(attempt: Callable[[], Awaitable[Answer]], pause_s: float) -> Answer:
    """The first answer of several attempts; the others are cancelled.

    An attempt begins when the last one has been silent for `pause_s`, up to MOST_ATTEMPTS. If one is refused
    (Unavailable, ResourceExhausted) while others are running, the others decide. Otherwise its error is raised.
    """
    waiting = {asyncio.ensure_future(attempt())}
    begun = 1
    try:
        while True:
            pause = pause_s if begun < MOST_ATTEMPTS else None
            done, waiting = await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=_failed):
                failure = task.exception()
                if failure is None:
                    return task.result()
                if not waiting or not isinstance(failure, Unavailable | ResourceExhausted):
                    raise failure
            if not done:
                waiting.add(asyncio.ensure_future(attempt()))
                begun += 1
    finally:
        for task in waiting:
            task.cancel()


def _failed(task: "asyncio.Future[Answer]") -> bool:
    return task.exception() is not None
