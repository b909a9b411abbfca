"""The only rank of a learner, in a thread of this process: no other process has to start, and none can be lost."""

import asyncio
import functools
from collections.abc import Awaitable
from typing import Any

from quartet.ranks.group import RankDied
from quartet.ranks.rank import Rank
from quartet.threads import DaemonThread


class ThreadRank:
    """A RankProcess without the process. One thread: calls take turns, each sees one set of weights.

    A call that does not return to Python cannot be ended, and keeps its model.
    """

    death = ""
    stopped = False

    def __init__(self, timeout_s: float) -> None:
        self.rank: Rank | None = Rank(0, 1, timeout_s)
        self._thread = DaemonThread("rank")
        self._beside: list[DaemonThread] = []

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Calls the rank's method in its thread; `run_beside` in another one."""
        if self.rank is None:
            raise RankDied("its thread was shut down")
        called = functools.partial(getattr(self.rank, method), *arguments, **options)
        loop = asyncio.get_running_loop()
        if method != "run_beside":
            return loop.run_in_executor(self._thread, called)
        beside = DaemonThread("rank, beside")
        answer = loop.run_in_executor(beside, called)
        beside.shutdown()
        self._beside = [each for each in (*self._beside, beside) if each.busy]
        return answer

    def kill(self) -> bool:
        """See RankProcess. False if a call runs, which is interrupted as soon as it can be. Those that wait do not
        begin. The model's memory is given back, at the end of that call."""
        self._thread.shutdown(cancel_futures=True)
        self.rank = None
        running = [each for each in (self._thread, *self._beside) if each.busy]
        for each in running:
            each.interrupt()
        return not running
