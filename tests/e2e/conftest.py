"""A run of three steps that nothing happens to, and what listens meanwhile."""

import asyncio
import shutil

import psutil
import pytest

from orchestrator.deployment.listeners import Listener, listeners, unguarded
from tests.cluster import Quartet
from tests.commands import PATIENCE_S, Command
from tests.runs import Ended


@pytest.fixture(scope="package")
async def ended(quartet: Quartet) -> Ended:
    """Started elsewhere than the cluster was."""
    elsewhere = quartet.folder / "elsewhere"
    shutil.copytree(quartet.folder / ".quartet", elsewhere / ".quartet")
    before = (await quartet.services.rollout.info(30)).policy_version
    log = elsewhere / "train.log"
    process = Command(elsewhere, log, "train", str(quartet.config))
    running = asyncio.create_task(asyncio.to_thread(process.wait, PATIENCE_S))
    seen: set[Listener] = set()
    opened: list[Listener] = []
    drivers: set[int] = set()
    while not running.done():
        # This process has joined the head; the run's is below it.
        own = psutil.Process().children(recursive=True)
        drivers |= {process.pid for process in own}
        listening = set(listeners([*quartet.cluster.processes(), *own])) - seen
        opened += await asyncio.to_thread(unguarded, listening)
        seen |= listening
        await asyncio.sleep(0.3)
    assert await running == 0, log.read_text()
    return Ended(elsewhere / "runs" / "three-steps", before, seen, opened, drivers)
