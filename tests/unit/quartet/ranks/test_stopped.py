"""A group looks after the processes of its ranks: what stands still is given up, and what is busy is not."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from quartet.ranks.group import LOOK_S, STOPPED_LOOKS, RankGroup, RanksLost
from quartet.ranks.ranks import Ranks
from tests.unit.rank_processes import SpawnedRank, spawned
from tests.unit.waiting import until

pytestmark = pytest.mark.processes


class Trainer:
    """The trainer that the rank's process runs."""

    def __init__(self, ranks: Ranks) -> None:
        self.seen: list[int] = []

    def pid(self) -> int:
        return os.getpid()

    def note(self, number: int, seconds: float = 0) -> list[int]:
        time.sleep(seconds)
        self.seen.append(number)
        return self.seen

    def searched(self) -> float:
        """Objects that a search for garbage looks at, for each that it does not."""
        return len(gc.get_objects()) / gc.get_freeze_count()


@asynccontextmanager
async def started() -> AsyncIterator[tuple[RankGroup, SpawnedRank, int]]:
    async with spawned(Trainer, ranks=1) as (group, (rank,)):
        yield group, rank, await group.call(Trainer.pid, 60)


async def test_a_group_notices_that_its_rank_died_between_two_calls() -> None:
    async with started() as (group, rank, pid):
        group.check()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: rank.death)
        with pytest.raises(RanksLost, match=r"^learner: rank 0 of 1 died: its process has ended$"):
            group.check()


async def test_a_group_notices_that_its_rank_stands_still() -> None:
    async with started() as (group, rank, pid):
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        lost = r"^learner.note: rank 0 of 1 died: a signal has stopped its process$"
        with pytest.raises(RanksLost, match=lost):
            await group.call(Trainer.note, 600, 1)
        assert time.monotonic() - began < 30
        with pytest.raises(RanksLost, match=lost):
            group.check()
        await until(lambda: rank.death)


async def test_a_rank_that_waits_for_long_does_not_stand_still() -> None:
    """Neither does one that was stopped for less than the looks that count."""
    async with started() as (group, rank, pid):
        noting = asyncio.ensure_future(group.call(Trainer.note, 60, 1, seconds=LOOK_S * (STOPPED_LOOKS + 3)))
        await asyncio.sleep(LOOK_S)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: rank.stopped)  # the signal takes effect when the process is next scheduled
        await asyncio.sleep(LOOK_S * STOPPED_LOOKS / 2)
        os.kill(pid, signal.SIGCONT)
        assert await noting == [1]
        assert not rank.stopped
        # What was imported is not searched for garbage either.
        assert await group.call(Trainer.searched, 60) < 0.05


def test_the_class_of_a_rank_is_read_without_the_libraries_of_its_model() -> None:
    """Until it is, the rank's process is not known, and nothing notices that it stands still."""
    code = "import sys, quartet.ranks.rank; print(sorted({'torch', 'deepspeed', 'ray'} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


async def test_a_group_that_is_stopped_has_given_all_its_memory_back() -> None:
    """A restoration needs that memory, since it begins with new ranks."""
    async with started() as (group, _, pid):
        process = psutil.Process(pid)
        group.stop()
        process.wait(5)
        assert not process.is_running()
