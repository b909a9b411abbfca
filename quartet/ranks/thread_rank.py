"""The only rank of a learner, in a thread of this process: no other process has to start, and none can be lost."""

import asyncio
import functools
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quartet.ranks.group import RankDied
from quartet.ranks.rank import Rank


class ThreadRank:
    """A RankProcess without the process. One thread: calls take turns, each sees one set of weights."""

    death = ""
    stopped = False

    def __init__(self, timeout_s: float) -> None:
        self.rank: Rank | None = Rank(0, 1, timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """Calls the rank's method in its thread."""
        if self.rank is None:
            raise RankDied("its thread was shut down")
        called = functools.partial(getattr(self.rank, method), *arguments, **options)
        # None is the loop's own pool of threads.
        thread = None if method == "run_beside" else self._thread
        try:
            return asyncio.get_running_loop().run_in_executor(thread, called)
        except RuntimeError:
            raise RankDied("its thread was shut down") from None

    def kill(self) -> None:
        """See RankProcess; what runs is not stopped, what waits does not begin. The model's memory is given back."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.rank = None
