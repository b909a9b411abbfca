"""Ranks as spawned processes, driven as the services drive Ray actors, with gloo between them for real."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil

from quartet.ranks.group import RankDied, RankGroup
from quartet.ranks.rank import Rank
from quartet.ranks.stopped import has_ended, is_stopped
from tests.forked import FORKED

HOST = "127.0.0.1"


class SpawnedRank:
    """A RankProcess."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._pipe, end = FORKED.Pipe()
        self.process = FORKED.Process(target=serve, args=(end, rank, world_size, timeout_s), daemon=True)
        self.process.start()
        end.close()
        self._thread = ThreadPoolExecutor(1)
        self._seen = psutil.Process(self.process.pid)

    @property
    def death(self) -> str:
        return "its process has ended" if has_ended(self._seen) else ""

    @property
    def stopped(self) -> bool:
        return is_stopped(self._seen)

    def call(self, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        if method == "open":
            options["host"] = HOST
        return asyncio.get_running_loop().run_in_executor(self._thread, self._call, method, arguments, options)

    def _call(self, *call: Any) -> Any:
        try:
            self._pipe.send(call)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RankDied("its pipe broke") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> bool:
        self.process.kill()
        self._thread.shutdown(wait=False)
        return True


def serve(pipe: Connection, rank: int, world_size: int, timeout_s: float) -> None:
    """Answers calls until the other end closes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    served = Rank(rank, world_size, timeout_s)
    while True:
        try:
            method, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(served, method)(*arguments, **options)
        except Exception as error:
            answer = error
        pipe.send(answer)


@asynccontextmanager
async def spawned(build: Any, *arguments: Any, ranks: int) -> AsyncIterator[tuple[RankGroup, list[SpawnedRank]]]:
    """A started group of so many ranks, and its processes."""
    processes = [SpawnedRank(rank, ranks, timeout_s=60) for rank in range(ranks)]
    group = RankGroup("learner", processes)
    try:
        await group.start(build, *arguments, timeout_s=120)
        yield group, processes
    finally:
        group.stop()
        for rank in processes:
            await asyncio.to_thread(rank.process.join, 10)
