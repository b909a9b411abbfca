"""A rank in a process of its own: its calls, its errors and its end."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from quartet.ranks.group import LOOK_S, STOPPED_LOOKS, RankDied, RankGroup, RanksLost
from quartet.ranks.process_rank import ProcessRank
from quartet.ranks.ranks import Ranks
from quartet.wire.errors import InvalidArgument
from tests.unit.waiting import until

pytestmark = pytest.mark.processes


class Odd(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


class Trainer:
    """The trainer that the rank's process runs."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.seen = ranks, [0]

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def note(self, number: int, seconds: float = 0) -> list[int]:
        time.sleep(seconds)
        self.seen.append(number)
        return self.seen

    def searched(self) -> float:
        """Objects that a search for garbage looks at, for each that it does not."""
        return len(gc.get_objects()) / gc.get_freeze_count()

    def hold(self, seconds: float) -> float:
        """Computes while no other thread of the process runs."""
        interval, began = sys.getswitchinterval(), time.monotonic()
        sys.setswitchinterval(3600)
        while time.monotonic() - began < seconds:
            pass
        sys.setswitchinterval(interval)
        return time.monotonic() - began

    def fail(self, how: str) -> Any:
        if how == "odd":
            raise Odd("o", "dd")
        if how == "lambda":
            return lambda: None
        raise InvalidArgument(how)


@asynccontextmanager
async def started() -> AsyncIterator[ProcessRank]:
    """A rank that was started in a folder with a module that has the name of one of its libraries."""
    os.environ["QUARTET_TEST"] = "7"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("torch.py").write_text("raise SystemExit('the module of the current folder')")
        rank = ProcessRank(60)
        del os.environ["QUARTET_TEST"]
        await rank.call("open")
    await rank.call("start", None, Trainer)
    yield rank
    rank.kill()


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[ProcessRank]:
    async with started() as rank:
        yield rank


@pytest.fixture
async def rank(shared: ProcessRank) -> ProcessRank:
    """A rank with a trainer of its own; its process is shared by the tests that do not end it."""
    await shared.call("start", None, Trainer)
    return shared


@pytest.fixture
async def mortal() -> AsyncIterator[ProcessRank]:
    async with started() as rank:
        yield rank


async def test_it_answers_in_turn_from_a_process_that_has_its_environment(rank: ProcessRank) -> None:
    assert await rank.call("run", "Trainer.pid") != os.getpid()
    assert await rank.call("run", "Trainer.variable", "QUARTET_TEST") == "7"
    assert await rank.call("run", "Trainer.variable", "CUDA_VISIBLE_DEVICES") == ""  # as this process may use none
    calls = [rank.call("run", "Trainer.note", number, seconds=0.1 / number) for number in (1, 2, 3)]
    assert (await asyncio.gather(*calls))[-1] == [0, 1, 2, 3]


async def test_what_was_imported_is_not_searched_for_garbage(rank: ProcessRank) -> None:
    assert await rank.call("run", "Trainer.searched") < 0.05


async def test_what_runs_beside_does_not_wait(rank: ProcessRank) -> None:
    slow = rank.call("run", "Trainer.note", 1, seconds=1)
    assert await rank.call("run_beside", "Trainer.note", 2) == [0, 2]
    assert await slow == [0, 2, 1]


async def test_errors_arrive_as_they_are_or_as_what_can_be_sent(rank: ProcessRank) -> None:
    with pytest.raises(InvalidArgument, match=r"^path$"):
        await rank.call("run", "Trainer.fail", "path")
    with pytest.raises(RuntimeError, match=r"^Odd: odd$"):
        await rank.call("run", "Trainer.fail", "odd")
    with pytest.raises(TypeError, match="the answer cannot be sent"):
        await rank.call("run", "Trainer.fail", "lambda")
    with pytest.raises(TypeError, match="the call cannot be sent"):
        await rank.call("run", "Trainer.note", lambda: None)
    assert await rank.call("run", "Trainer.note", 1) == [0, 1]


async def test_its_death_ends_what_was_asked_and_everything_after(mortal: ProcessRank) -> None:
    pid = await mortal.call("run", "Trainer.pid")
    asked = mortal.call("run", "Trainer.note", 1, seconds=60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankDied, match="its process ended with exit code -9"):
        await asked
    with pytest.raises(RankDied, match="exit code -9"):
        await mortal.call("run", "Trainer.pid")


async def test_a_group_notices_that_its_rank_died_between_two_calls(mortal: ProcessRank) -> None:
    pid, group = await mortal.call("run", "Trainer.pid"), RankGroup("critic", [mortal])
    group.check()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: mortal.death)
    with pytest.raises(RanksLost, match=r"^critic: rank 0 of 1 died: its process ended with exit code -9$"):
        group.check()


async def test_a_group_notices_that_its_rank_stands_still(mortal: ProcessRank) -> None:
    pid, group = await mortal.call("run", "Trainer.pid"), RankGroup("critic", [mortal])
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    lost = r"^critic.note: rank 0 of 1 died: a signal has stopped its process$"
    with pytest.raises(RanksLost, match=lost):
        await group.call(Trainer.note, 600, 1)
    assert time.monotonic() - began < 30
    with pytest.raises(RanksLost, match=lost):
        group.check()
    await until(lambda: mortal.death)


async def test_a_rank_that_computes_or_waits_for_long_does_not_stand_still(rank: ProcessRank) -> None:
    """Neither does one that was stopped for less than the looks that count."""
    pid = await rank.call("run", "Trainer.pid")
    group, seconds = RankGroup("critic", [rank]), LOOK_S * (STOPPED_LOOKS + 3)
    noting = asyncio.ensure_future(group.call(Trainer.note, 60, 1, seconds=seconds))
    await asyncio.sleep(LOOK_S)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: rank.stopped)  # the signal takes effect when the process is next scheduled
    await asyncio.sleep(LOOK_S * STOPPED_LOOKS / 2)
    os.kill(pid, signal.SIGCONT)
    assert await noting == [0, 1]
    assert not rank.stopped
    assert await group.call(Trainer.hold, 60, seconds=seconds) >= seconds


async def test_a_group_that_is_stopped_has_given_all_its_memory_back(mortal: ProcessRank) -> None:
    """A restoration needs that memory, since it begins with new ranks."""
    process = psutil.Process(await mortal.call("run", "Trainer.pid"))
    RankGroup("critic", [mortal]).stop()
    process.wait(5)
    assert not process.is_running()


def test_it_ends_with_the_process_that_made_it() -> None:
    code = (
        "import asyncio, os\n"
        "from quartet.ranks.process_rank import ProcessRank\n"
        "async def main():\n"
        "    rank = ProcessRank(60)\n"
        "    await rank.call('open')\n"
        "    print(rank._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    maker = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert maker.returncode == -9
    end = time.monotonic() + 10
    while psutil.pid_exists(int(maker.stdout)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(maker.stdout))
