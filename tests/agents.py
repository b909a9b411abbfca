"""Agents for tests, named by import path."""

import asyncio
from pathlib import Path

from examples.agent import solve
from orchestrator.environments.agent import Task
from tests.environments import HELD, HOLD

FAILED = Path("failed")
"""File in the folder of a run that has a line for each conversation that failed on purpose."""


async def held(task: Task) -> int:
    """Asks as examples/agent.py does, but waits before that while HOLD exists, and before its end too."""
    for _ in range(2):
        if HOLD.exists():
            with HELD.open("a") as file:
                file.write(f"{task.sample}\n")
        while HOLD.exists():
            await asyncio.sleep(0.05)
    return await solve(task)


async def failing(task: Task) -> int:
    """Fails after its conversation, the first time that it has one with each third sample."""
    tries = await solve(task)
    known = FAILED.read_text().split() if FAILED.exists() else []
    if task.sample % 3 == 0 and str(task.sample) not in known:
        with FAILED.open("a") as file:
            file.write(f"{task.sample}\n")
        raise ConnectionError("a sandbox was lost")
    return tries
