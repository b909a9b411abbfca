"""A process of a run or of its services that a signal has stopped is ended, and nothing else is."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from orchestrator.commands import halted
from orchestrator.commands.halted import LOOKS, ending_halted
from orchestrator.deployment.cluster import Cluster
from orchestrator.deployment.processes import MARK
from tests.unit.waiting import until

pytestmark = pytest.mark.processes

SECRET = secrets.token_hex(32)
LOOK_S = 0.5
"""Shorter than for a run, so that the tests wait for less."""
TITLES = (
    "ray::PolicyRank",
    "ray::CriticRank.run",
    "ray::Registry",
    "ray::ServeReplica:critic:Critic",
    "ray::SERVE_REPLICA::reward#Reward#julptkm2:ServeReplica:reward:Reward.__init__",
    "ray::ProxyActor",
    "ray::SERVE_PROXY_ACTOR-1f:ProxyActor.__init__",
    "ray::ServeController",
)
OTHERS = ("ray::DashboardAgent", "ray::IDLE", "ray::Ranking", "raylet", "python")
"""Titles of the head's other processes, in whose place the system would not start others."""

DEBUGGER = """
import ctypes, os, shutil, signal, subprocess, sys
held = subprocess.Popen([sys.argv[1], "600"], executable=shutil.which("sleep"), stdout=subprocess.DEVNULL)
attach = 16
assert ctypes.CDLL(None).ptrace(attach, held.pid, None, None) == 0
print(held.pid, flush=True)
sys.stdin.read()
os.kill(held.pid, signal.SIGKILL)  # held.kill() would take the stop for an end
"""
"""Holds a process with a title until its input ends, as gdb does."""

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks so often."""
    monkeypatch.setattr(halted, "LOOK_S", LOOK_S)


@pytest.fixture
def head(tmp_path: Path) -> Cluster:
    return Cluster(os.getpid(), 0.0, "", "", "", str(tmp_path), SECRET)


@pytest.fixture
async def titled() -> AsyncIterator[Start]:
    """Starts a process of the head with a title."""
    started: list[asyncio.subprocess.Process] = []

    async def start(title: str, secret: str = SECRET) -> asyncio.subprocess.Process:
        command = ["bash", "-c", f"exec -a '{title}' sleep 600"]
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | {MARK: secret})
        started.append(process)
        await until(lambda: psutil.Process(process.pid).cmdline()[:1] == [title])
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_what_is_stopped_and_has_a_successor_is_ended(head: Cluster, titled: Start) -> None:
    ours, others = [await titled(title) for title in TITLES], [await titled(title) for title in OTHERS]
    well, foreign = await titled(TITLES[0]), await titled(TITLES[0], "8" * 64)
    for process in (*ours, *others, foreign):
        process.send_signal(signal.SIGSTOP)
    async with ending_halted(lambda: head), asyncio.timeout(20 * LOOK_S * LOOKS):
        assert [await process.wait() for process in ours] == [-signal.SIGKILL] * len(TITLES)
        await asyncio.sleep(2 * LOOK_S)
    assert [process.returncode for process in (*others, well, foreign)] == [None] * (len(OTHERS) + 2)


async def test_what_goes_on_in_time_is_left_alone(head: Cluster, titled: Start) -> None:
    process = await titled(TITLES[0])
    async with ending_halted(lambda: head):
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(LOOK_S * (LOOKS - 1.5))
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(2 * LOOK_S)
    assert process.returncode is None


async def test_what_a_debugger_holds_is_left_alone(head: Cluster) -> None:
    script = [sys.executable, "-c", DEBUGGER, TITLES[0]]
    pipe, environment = subprocess.PIPE, os.environ | {MARK: SECRET}
    with subprocess.Popen(script, env=environment, text=True, stdin=pipe, stdout=pipe) as debugger:
        assert debugger.stdin
        assert debugger.stdout
        held = psutil.Process(int(debugger.stdout.readline()))
        assert held.cmdline()[0] == TITLES[0]
        async with ending_halted(lambda: head):
            await asyncio.sleep(LOOK_S * (LOOKS + 2))
        assert held.status() == psutil.STATUS_TRACING_STOP
        debugger.stdin.close()


async def test_a_record_that_cannot_be_read_is_read_again(head: Cluster, titled: Start) -> None:
    process = await titled(TITLES[0])
    process.send_signal(signal.SIGSTOP)
    answers = [OSError("busy")]

    def found() -> Cluster:
        if answers:
            raise answers.pop()
        return head

    async with ending_halted(found), asyncio.timeout(20 * LOOK_S * LOOKS):
        assert await process.wait() == -signal.SIGKILL


async def test_on_a_cluster_of_ones_own_nothing_is_ended(titled: Start) -> None:
    process = await titled(TITLES[0])
    process.send_signal(signal.SIGSTOP)
    async with ending_halted(lambda: None):
        await asyncio.sleep(LOOK_S * (LOOKS + 1))
    assert process.returncode is None
