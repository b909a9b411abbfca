"""The only rank of a learner, in a thread of this process."""

import asyncio
import functools
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.common.rank_group import RankDied
from services.common.ranks import Rank


class ThreadRank:
    """A RankProcess without the process. One thread: calls take turns, each sees one set of weights."""

    def __init__(self, timeout_s: float) -> None:
        self._rank = Rank(0, 1, timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        """See RankProcess."""
        called = functools.partial(getattr(self._rank, method), *arguments, **options)
        try:
            return asyncio.get_running_loop().run_in_executor(self._thread, called)
        except RuntimeError:
            raise RankDied("its thread was shut down") from None

    def kill(self) -> None:
        """See RankProcess; what runs is not stopped, what waits does not begin."""
        self._thread.shutdown(wait=False, cancel_futures=True)
