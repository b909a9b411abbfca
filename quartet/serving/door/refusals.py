"""Refused calls in the proxy's log: caller and reason, in few lines however many calls are refused."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger("quartet")
EVERY_S = 10.0


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
