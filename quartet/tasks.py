"""Ends tasks of an event loop; those that go on, though they are cancelled, are left behind after a while."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

CLEAN_UP_S = 30.0
"""Longest time for tasks to end after they are cancelled."""
_left: list[asyncio.Runner] = []
"""Event loops with tasks that go on: Python complains of those that nothing refers to."""


async def ended(tasks: Collection[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Cancels tasks, and waits for them, CLEAN_UP_S at most. Returns those that go on."""
    for task in tasks:
        task.cancel()
    return (await asyncio.wait(tasks, timeout=CLEAN_UP_S))[1] if tasks else set()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, in an event loop of its own, as by `asyncio.run`, which however waits at its end for
    all tasks that go on."""
    left: set[asyncio.Task[Any]] = set()

    async def whole() -> Result:
        try:
            return await main
        finally:
            left.update(await ended([task for task in asyncio.all_tasks() if task is not asyncio.current_task()]))

    runner = asyncio.Runner()
    try:
        return runner.run(whole())
    finally:
        if left:
            _left.append(runner)
        else:
            runner.close()
