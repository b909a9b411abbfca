"""A rank or registry that a signal has stopped while it starts is ended, and nothing else is."""

import asyncio
import os
import secrets
import signal
from pathlib import Path

import psutil
import pytest

from orchestrator.commands.halted import LOOK_S, TITLES, ending_halted
from orchestrator.deployment.cluster import Cluster
from orchestrator.deployment.processes import MARK
from tests.unit.waiting import until

pytestmark = pytest.mark.processes

SECRET = secrets.token_hex(32)


async def titled(title: str, secret: str = SECRET) -> asyncio.subprocess.Process:
    """A process of the head with this title."""
    command = ["bash", "-c", f"exec -a {title} sleep 600"]
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | {MARK: secret})
    await until(lambda: psutil.Process(process.pid).cmdline()[:1] == [title])
    return process


@pytest.mark.parametrize("title", TITLES)
async def test_a_stopped_rank_or_registry_of_the_head_is_ended(tmp_path: Path, title: str) -> None:
    head = Cluster(os.getpid(), 0.0, "", "", "", str(tmp_path), SECRET)
    rank, other, well = await titled(title), await titled("ray::ProxyActor"), await titled(title)
    foreign = await titled(title, "8" * 64)
    try:
        for process in (rank, other, foreign):
            process.send_signal(signal.SIGSTOP)
        async with ending_halted(head), asyncio.timeout(20 * LOOK_S):
            assert await rank.wait() == -signal.SIGKILL
        for process in (other, well, foreign):
            assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        for process in (rank, other, well, foreign):
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_on_a_cluster_of_ones_own_nothing_is_looked_at() -> None:
    async with ending_halted(None):
        pass
