"""The only rank in a thread: calls take turns, and one that does not end keeps neither the program nor its model."""

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from quartet.ranks.group import RankDied, RankGroup, RanksLost
from quartet.ranks.thread_rank import ThreadRank
from tests.unit.waiting import until

PROGRAM = """
import asyncio, sys, threading, time
from quartet.ranks.thread_rank import ThreadRank

class Busy:
    def __init__(self, begin):
        self.begin = begin

    def work(self):
        if sys.argv[1] == "library":
            self.begin()
            threading.Event().wait()
        import torch
        weights = torch.ones(100, 100, requires_grad=True)
        while True:
            (weights @ weights).sum().backward()
            self.begin()

async def main():
    rank, loop, begun = ThreadRank(60), asyncio.get_running_loop(), asyncio.Event()
    await rank.call("start", None, lambda ranks: Busy(lambda: loop.call_soon_threadsafe(begun.set)))
    call = rank.call(sys.argv[2], "Busy.work")
    await begun.wait()
    print("begun", flush=True)
    raise KeyboardInterrupt

asyncio.run(main())
"""


class Worker:
    """A trainer."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.begun, self.gate = threading.Event(), threading.Event()

    def work(self) -> str:
        self.threads.append(threading.current_thread().name)
        return self.threads[-1]

    def hang(self) -> None:
        self.begun.set()
        self.gate.wait(30)

    def spin(self) -> None:
        self.begun.set()
        while not self.gate.is_set():
            time.sleep(0.001)


async def started(worker: Worker) -> ThreadRank:
    rank = ThreadRank(60)
    await rank.call("start", None, lambda ranks: worker)
    return rank


async def test_calls_take_turns_in_one_thread_and_others_run_beside() -> None:
    worker = Worker()
    rank = await started(worker)
    hanging = asyncio.ensure_future(rank.call("run", "Worker.hang"))
    waiting = asyncio.ensure_future(rank.call("run", "Worker.work"))
    assert await rank.call("run_beside", "Worker.work") == "rank, beside"
    assert not waiting.done()
    worker.gate.set()
    await hanging
    assert await waiting == "rank"
    assert rank.kill()
    with pytest.raises(RankDied, match="shut down"):
        await rank.call("run", "Worker.work")


@pytest.mark.parametrize("method", ["run", "run_beside"])
async def test_a_call_that_goes_on_is_told(method: str) -> None:
    worker = Worker()
    rank = await started(worker)
    call = asyncio.ensure_future(rank.call(method, "Worker.hang"))
    await until(worker.begun.is_set)
    assert not rank.kill()
    worker.gate.set()
    with pytest.raises(RuntimeError, match="SystemExit"):
        await call
    assert rank.kill()


async def test_a_call_in_python_is_interrupted_and_what_waits_does_not_begin() -> None:
    worker = Worker()
    rank = await started(worker)
    ours: Any = RankGroup("model", [rank])
    waiting = asyncio.ensure_future(rank.call("run", "Worker.spin"))
    await until(worker.begun.is_set)
    with pytest.raises(RanksLost, match=r"model.work: no answer within 0.05 s from rank 0 of 1"):
        await ours.call(Worker.work, 0.05)
    assert ours.goes_on
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="SystemExit"):
            await waiting
    assert worker.threads == []


@pytest.mark.parametrize(("where", "method"), [("python", "run"), ("library", "run_beside")])
def test_a_program_that_is_interrupted_ends_at_once_without_a_crash(where: str, method: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, where, method], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stdout == "begun\n"
    assert ended.stderr.strip().endswith("KeyboardInterrupt")
    assert "terminate" not in ended.stderr
