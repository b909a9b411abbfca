"""Refused and failed calls in the logs: few lines however many there are, and none with a trace."""

import logging
import time
from collections.abc import Callable

from ray.serve.exceptions import gRPCStatusError

from quartet.wire.errors import ServiceError

log = logging.getLogger("quartet")
EVERY_S = 10.0
"""Seconds in which lines are counted."""
LINES = 20
"""Most lines in EVERY_S seconds."""
_LONGEST = 300


class Refusals:
    """Logs the first refusal at once and then a summary at most every ten seconds, so that strangers cannot fill the
    disk with log lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = 0.0
        self._unsaid = 0

    def note(self, method: str, peer: str, reason: str) -> None:
        """Counts a refusal, and logs it if ten seconds have passed since the last line."""
        if self._clock() < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        log.warning("refused %s from %s: %s%s", method, peer, reason, more)
        self._unsaid, self._silent_until = 0, self._clock() + EVERY_S


class FailedCalls(logging.Filter):
    """Shortens what Serve logs about a call that a replica answered with an error, and drops most of very many.

    Serve writes the whole trace, in the proxy, in the replica, and in a replica that this one asks: 2.6 kB each for a
    mistake of a client, into files that are not rotated. The trace of an error of our own is in the replica's log
    already.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since = clock()
        self._lines = self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """False drops the record; others pass, those of failed calls without their trace."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, gRPCStatusError | ServiceError):
            return True
        error = getattr(error, "cause", error)  # of one that Ray passed on
        if self._clock() - self._since >= EVERY_S:
            self._since, self._lines = self._clock(), 0
        if self._lines == LINES:
            self._dropped += 1
            return False
        more = f" ({self._dropped} more before this line)" if self._dropped else ""
        reason = " ".join(str(getattr(error, "original_exception", error)).split())[:_LONGEST]
        record.msg, record.args = f"{record.getMessage()} {reason}{more}", ()
        record.exc_info = record.exc_text = None
        self._lines, self._dropped = self._lines + 1, 0
        return True


def shorten_failed_calls() -> None:
    """Installs the filter in this process, a replica or Serve's proxy. A second call changes nothing."""
    logger = logging.getLogger("ray.serve")
    if not any(isinstance(present, FailedCalls) for present in logger.filters):
        logger.addFilter(FailedCalls())
