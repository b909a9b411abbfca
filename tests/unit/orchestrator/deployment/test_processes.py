"""The processes of a head: found wherever they are, ended, and nothing of them left in /dev/shm."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.deployment.processes import MARK, end, family

pytestmark = pytest.mark.processes

# Semaphore and memory have names, which the tracker of this process removes, if it is let.
HOLDER = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Semaphore(1)
memory = SharedMemory(create=True, size=10)
print("sem." + lock._semlock.name.lstrip("/"), memory.name, flush=True)
time.sleep(600)
"""
ORPHAN = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(left.pid, flush=True)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    for process in family(mark):
        process.kill()


def start(code: str, mark: str) -> "subprocess.Popen[str]":
    environment = os.environ | {MARK: mark}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def said(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout
    return process.stdout.readline().split()


def test_a_family_ends_and_takes_its_semaphores_and_memory_along(mark: str) -> None:
    holder, other = start(HOLDER, mark), start(HOLDER, "another head's")
    theirs, others = ([Path("/dev/shm", name) for name in said(process)] for process in (holder, other))
    assert all(path.exists() for path in [*theirs, *others])
    members = family(mark)
    assert {holder.pid} < {member.pid for member in members}  # and the tracker
    end(members, 10)
    holder.wait(10)
    assert family(mark) == []
    assert not any(path.exists() for path in theirs)
    assert other.poll() is None
    assert all(path.exists() for path in others)
    end([psutil.Process(other.pid), *psutil.Process(other.pid).children()], 10)
    assert not any(path.exists() for path in others)


def test_what_outlives_its_parent_is_of_the_family(mark: str) -> None:
    parent = start(ORPHAN, mark)
    (left,) = map(int, said(parent))
    parent.wait(10)
    assert [member.pid for member in family(mark)] == [left]
    end(family(mark), 10)
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family(mark))
