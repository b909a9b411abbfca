"""Limits on the work that waits in a service, in total and for each caller."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quartet.config.limits import LimitsConfig
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from quartet.wire.errors import ResourceExhausted

MOST_ONGOING = 4096
"""Calls that Serve passes to a replica at a time. More than a service ever admits, so that the service decides which
call waits, and health checks always get through."""
SHORTEST_S, LONGEST_S = 0.1, 10.0
"""Shortest and longest pause that a refused caller is asked to make."""
_NEWEST_CALL_WEIGHT = 0.2
"""Weight of the newest call in the running mean of the calls' duration."""


class Admission:
    """Counts the calls in progress, their rows and tokens, and refuses calls beyond the limits.

    A check costs the same for every call, whatever its size, and comes before the call is decoded.
    """

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            limits: the limits.
            clock: returns seconds.
        """
        self._limits = limits
        self._clock = clock
        self._callers: Counter[tuple[Share, str]] = Counter()
        self._all: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._call_s = 1.0

    @property
    def waiting_rows(self) -> int:
        """Rows that are admitted and not answered."""
        return self._all["rows"]

    @contextmanager
    def admitted(self, share: Share, rows: int, tokens: int | Callable[[], int], field: str) -> Iterator[None]:
        """Context in which a call counts as in progress.

        Args:
            share: the caller's share.
            rows: number of prompts or pairs.
            tokens: number of tokens of all rows; a function is called only if the rows are few enough.
            field: the request's field that errors name.

        Raises:
            ResourceExhausted: the call is larger than any call may be; or too much work waits already, and then the
                error holds the pause after which to try again.
        """
        self.check_call("rows", rows, field)
        asked = {"rows": rows, "tokens": tokens() if callable(tokens) else tokens}
        self.check_call("tokens", asked["tokens"], field)
        asked["calls"] = 1
        for unit, count in asked.items():
            self._check_waiting(share, unit, count, field)
        self._count(share, asked, 1)
        began = self._clock()
        try:
            yield
        finally:
            self._call_s += _NEWEST_CALL_WEIGHT * (self._clock() - began - self._call_s)
            self._count(share, asked, -1)

    def check_call(self, unit: str, count: int, field: str) -> None:
        """Refuses a call of more rows or tokens than any may hold. Raises as `admitted`."""
        most = getattr(self._limits, f"max_call_{unit}")
        if count > most:
            raise ResourceExhausted(f"{field}: {count} {unit}, but a call may hold {most}; send it in several")

    def _check_waiting(self, share: Share, unit: str, count: int, field: str) -> None:
        most = getattr(self._limits, f"max_waiting_{unit}")
        own = int(self._limits.caller_share * most)
        open_to_all = int((1 - self._limits.training_reserve) * most)
        checks = [(self._callers[share, unit], own, "of this caller"), (self._all[unit], most, "in all")]
        if share.purpose is not Purpose.TRAINING:
            checks.append((self._others[unit], open_to_all, "beside training"))
        for waiting, limit, whose in checks:
            if waiting + count > limit:
                pause_s = min(max(self._call_s, SHORTEST_S), LONGEST_S)
                raise ResourceExhausted(
                    f"{field}: {count} {unit} are refused, as {waiting} {whose} wait already and {limit} may",
                    pause_s,
                )

    def _count(self, share: Share, asked: dict[str, int], sign: int) -> None:
        for unit, count in asked.items():
            self._callers[share, unit] += sign * count
            if not self._callers[share, unit]:
                del self._callers[share, unit]
            self._all[unit] += sign * count
            if share.purpose is not Purpose.TRAINING:
                self._others[unit] += sign * count
