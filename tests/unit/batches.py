"""Work for a batcher whose rows are plain numbers, and a function that computes when it is told to."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from quartet.serving.batcher import Batcher
from quartet.serving.share import Share
from quartet.wire.callers import Purpose
from tests.unit.waiting import until


class Numbers:
    """One call: numbers, each of so many tokens."""

    def __init__(self, numbers: Sequence[int], tokens: int = 1) -> None:
        self.numbers = numbers
        self.costs = np.full(len(numbers), tokens, np.int32)
        self.out: list[Any] = [None] * len(numbers)

    def items(self, rows: Sequence[int]) -> list[int]:
        return [self.numbers[row] for row in rows]

    def put(self, rows: Sequence[int], results: Sequence[Any]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.out[row] = result


class Doubler:
    """Doubles numbers in passes that wait for `gate`; a negative one breaks its pass."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.gate.wait(10)
        if any(item < 0 for item in items):
            raise ValueError(f"negative: {min(items)}")
        return [2 * item for item in items]


def share(name: str = "run", purpose: Purpose = Purpose.TRAINING) -> Share:
    return Share(name, purpose)


def make_batcher(run: Any, *, batch_tokens: int = 100, batch_s: float = 10, **options: Any) -> Batcher[int, int]:
    return Batcher(run, batch_tokens=batch_tokens, batch_s=batch_s, **options)


async def ask(batcher: Batcher[int, int], numbers: Sequence[int], whose: Share | None = None, tokens: int = 1) -> Any:
    """The results for the numbers of one call."""
    work = Numbers(numbers, tokens)
    await batcher.submit(whose or share(), work)
    return work.out


async def busy(batcher: Batcher[int, int], doubler: Doubler) -> "asyncio.Task[Any]":
    """A pass of one number that computes until the gate opens."""
    first = asyncio.create_task(ask(batcher, [0]))
    await until(doubler.begun.is_set)
    return first


async def queued(batcher: Batcher[int, int], *calls: list[int], whose: Share | None = None, tokens: int = 1) -> Any:
    """Calls that wait for the pass in progress."""
    tasks = [asyncio.create_task(ask(batcher, numbers, whose, tokens)) for numbers in calls]
    await asyncio.sleep(0)
    return tasks
