"""The part of an engine that callers outside of a run have while the run holds it."""

import math
import time
from collections.abc import Callable

SAVED_S = 0.25
"""Most of the engine's time that is saved up while none of it is used."""
LONGEST_S = 60.0
"""Longest time for which rows that took long are made up for, as callers give up some time."""
PASSAGE_S = 0.03
"""Time of a core that a row takes where the engine computes on cores too: in proxy, replica and engine, as measured
(benchmarks/RESULTS.md, the door of OpenAI's protocol)."""


class Guests:
    """Says when the next row of a caller outside of the run may start.

    Rows are charged for their part of the engine while they are in it: two of eight rows for a quarter of the time,
    and rows that are in it without any of the run's for all of it, as the run's learners compute meanwhile. Such time
    is free where the engine has a device of its own. Where it computes on the cores that all share, each row is also
    charged for PASSAGE_S. Together they may have `share` of the time. A row that runs is never interrupted, so what
    it takes beyond is made up for by a later start of the next, LONGEST_S later at most.

    For example, with a share of 0.05, a row that had the engine alone for 0.1 s is followed by the next 2 s after its
    start, or 2.6 s on cores.
    """

    def __init__(
        self,
        share: float,
        held: Callable[[], bool],
        *,
        gpus: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            share: part of the engine's time, above 0; 1 for no limit.
            held: returns True while a run holds the engine.
            gpus: those of the engine; a part of one is what learners compute on too.
            clock: returns seconds.
        """
        self._share, self._held, self._clock = share, held, clock
        self._own_device, self._row_s = gpus >= 1, 0.0 if gpus else PASSAGE_S
        self._at = clock()
        self._saved_s = SAVED_S

    def pass_time(self, foreign: int, rows: int) -> None:
        """Charges the time since the last call, in which so many foreign rows were among all the rows in the
        engine."""
        now = self._clock()
        passed, self._at = now - self._at, now
        alone = foreign == rows
        part = 0.0 if not foreign or (alone and self._own_device) else foreign / rows
        saved_s = max(self._saved_s + passed * (self._share - part), -LONGEST_S * self._share)
        self._saved_s = min(saved_s, SAVED_S) if self._held() else SAVED_S

    def begin(self) -> None:
        """Charges a row that starts."""
        self._saved_s -= self._row_s

    @property
    def wait_s(self) -> float:
        """Seconds until the next may start, if none runs meanwhile; 0 now."""
        return 0.0 if self._saved_s >= 0 or self._share == 1 else -self._saved_s / self._share

    def most(self, count: int, foreign: int, rows: int) -> int:
        """Most of the engine's `count` rows that they may have now."""
        if not self._held() or self._share == 1 or (foreign == rows and self._own_device):
            return count
        return math.ceil(self._share * count)
