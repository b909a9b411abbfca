"""Deadlines, and the pauses between tries until one passes.

A busy service asks for a pause with RESOURCE_EXHAUSTED, in the status text: Serve carries code and text of a failed
call from the replica to the caller, but no trailing metadata.
"""

import asyncio
import math
import random
import re

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
LAST_TRY_S = 0.5
"""Seconds that must be left for one more try; fewer if the try before it took less."""
_PUSHBACK = re.compile(r" \(retry after (\d{1,9}) ms\)\Z")


class Deadline:
    """The moment by which a call must end, its repetitions and parts included."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """Seconds from the start to the deadline."""
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a millisecond: gRPC accepts no deadline in the past."""
        return max(self._end - self._clock(), 1e-3)

    def passes_within(self, seconds: float) -> bool:
        """True if the deadline passes within that many seconds."""
        return self.now + seconds >= self._end

    @property
    def now(self) -> float:
        """The time on the deadline's clock, in seconds."""
        return self._clock()


class Backoff:
    """Pauses that double, each shortened at random by up to a half, so that callers refused together do not return
    together."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        """The moment by which the last try must end."""
        self._pause = FIRST_PAUSE_S
        self._began = deadline.now
        """Beginning of the last try, on the deadline's clock."""

    async def wait(self, error: Exception, at_least_s: float | None = None) -> None:
        """Pauses before the next try; raises `error` when the deadline would pass first, or probably during a try
        that is as long as the last: that error says more than a timeout would.

        Args:
            error: the error of the last try.
            at_least_s: the pause that the service asked for; up to a quarter is added at random.
        """
        pause = max(self._pause * random.uniform(0.5, 1), (at_least_s or 0.0) * random.uniform(1, 1.25))
        took = min(self.deadline.now - self._began, LAST_TRY_S)
        if self.deadline.passes_within(pause + took):
            raise error
        await asyncio.sleep(pause)
        self._began = self.deadline.now
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)


def with_pushback(message: str, retry_after_s: float | None) -> str:
    """The message followed by the pause, rounded up to a millisecond; None adds nothing."""
    return message if retry_after_s is None else f"{message} (retry after {math.ceil(retry_after_s * 1000)} ms)"


def pushback_of(text: str) -> tuple[str, float | None]:
    """Splits a text made by `with_pushback` into message and pause in seconds."""
    match = _PUSHBACK.search(text)
    return (text[: match.start()], int(match[1]) / 1000) if match else (text, None)
