"""The calls that are open at the gRPC port, counted by caller, so that none keeps the others out."""

from collections import Counter
from collections.abc import Callable

from services.common.security.identity import Caller
from services.common.security.policy import Limits
from services.common.wire.errors import ResourceExhausted

PAUSE_S = 1.0
"""Pause that a refused caller is asked to make."""


class OpenCalls:
    """Counts open calls, from a caller's admission to the end of the reply, and refuses those beyond its share.

    gRPC counts all calls together: one caller that holds the most that may be open, by requests that it does not send
    or replies that it does not read, would keep all others out.
    """

    def __init__(self, limits: Callable[[], Limits]) -> None:
        """
        Args:
            limits: returns the current limits.
        """
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._beside_training = 0

    def begin(self, caller: Caller) -> Callable[[object], None]:
        """Counts a call; returns the function to call, with any argument, when the call is over.

        Raises:
            ResourceExhausted: the caller has its share of open calls, or those that are no trainers have theirs.
        """
        limits, trainer = self._limits(), caller.role == "trainer"
        own = int(limits.caller_share * limits.concurrent_calls)
        beside = int((1 - limits.training_reserve) * limits.concurrent_calls)
        if self._open[caller.name] >= own:
            raise ResourceExhausted(f"{caller.name} has {own} open calls, the most for one caller", PAUSE_S)
        if not trainer and self._beside_training >= beside:
            raise ResourceExhausted(f"{beside} calls are open, the most for callers that are no trainers", PAUSE_S)
        self._count(caller.name, 1, trainer=trainer)
        return lambda _: self._count(caller.name, -1, trainer=trainer)

    def _count(self, name: str, change: int, *, trainer: bool) -> None:
        self._open[name] += change
        if not self._open[name]:
            del self._open[name]
        self._beside_training += 0 if trainer else change
