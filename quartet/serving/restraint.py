"""Callers whose rows spoil passes: while there are others, each has its part of the passes and no more."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quartet.serving.share import Share


@dataclass(slots=True)
class _Caller:
    """A caller; times are those of a clock, in seconds."""

    seen: float = -math.inf
    running: int = 0
    """Passes with rows of its own."""
    spoilt: float = -math.inf
    """Time at which one of its rows last spoilt a pass."""
    rests_until: float = -math.inf
    in_vain_s: float = 0.0
    """Time of spoilt passes since the last one that succeeded."""


class Restraint:
    """Says when a caller may begin another pass. A pass that hangs takes far longer than others, so that equal shares
    of tokens would leave hardly any time to callers whose rows are quick.

    A caller whose rows have spoilt a pass in the last `memory_s` has as many passes at the same time as its part of
    all; where that is less than one pass, it rests after each that it spoils until the time of that was its part. It
    shares with those whose purpose is not lower than its own.
    """

    def __init__(self, passes: int, memory_s: float) -> None:
        """`passes` is the most passes at the same time."""
        self._passes, self._memory_s = passes, memory_s
        self._callers: dict[Share, _Caller] = {}
        """Callers of the last `memory_s`, in the order in which they were last seen."""

    def seen(self, share: Share, now: float) -> None:
        """Counts the caller as one that is there."""
        caller = self._callers.pop(share, None) or _Caller()
        caller.seen = now
        self._callers[share] = caller
        while (first := next(iter(self._callers.values()))).seen < now - self._memory_s and not first.running:
            del self._callers[next(iter(self._callers))]

    def begins(self, shares: Iterable[Share], now: float) -> None:
        """Counts a pass with rows of these callers."""
        for share in shares:
            self.seen(share, now)
            self._callers[share].running += 1

    def ends(self, shares: Iterable[Share], spoilt_s: float | None) -> None:
        """Counts it no more. It was spoilt after so many seconds, or not."""
        for share in shares:
            caller = self._callers[share]
            caller.running -= 1
            caller.in_vain_s = 0.0 if spoilt_s is None else caller.in_vain_s + spoilt_s / self._passes

    def spoils(self, share: Share, seconds: float, now: float) -> None:
        """A row of the caller has spoilt a pass that took so long."""
        caller = self._callers[share]
        caller.spoilt = now
        caller.rests_until = now + seconds * max(1 / self._part(share, now) - 1, 0)

    def in_vain(self, share: Share) -> bool:
        """True if no pass with the caller's rows has succeeded for `memory_s`."""
        return self._callers[share].in_vain_s > self._memory_s

    def apart(self, share: Share, now: float) -> bool:
        """True if the caller's rows are to have passes of their own, as others would wait for them."""
        return share in self._callers and now - self._callers[share].spoilt <= self._memory_s

    def wait_s(self, share: Share, now: float) -> float:
        """Seconds until the caller may begin another pass: 0 now, infinite until one of its passes ends."""
        if not self.apart(share, now):
            return 0.0
        caller = self._callers[share]
        if caller.running >= max(int(self._part(share, now)), 1):
            return math.inf
        return max(caller.rests_until - now, 0.0)

    def _part(self, share: Share, now: float) -> float:
        """The passes at the same time that are the caller's part."""
        others = sum(
            other != share and other.purpose <= share.purpose and caller.seen >= now - self._memory_s
            for other, caller in self._callers.items()
        )
        return self._passes / (1 + others)
