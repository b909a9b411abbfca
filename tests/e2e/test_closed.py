"""What a run listens on: its learners, its pushes and `quartet train` itself."""

import asyncio
import re

import psutil
import pytest
import yaml

from orchestrator.deployment.listeners import Listener, listeners, unguarded
from tests.cluster import Quartet, command


def alive(quartet: Quartet) -> list[psutil.Process]:
    """The head's processes, and the `quartet train` of this test, which has joined it."""
    return [*quartet.cluster.processes(), *psutil.Process().children(recursive=True)]


async def test_a_run_opens_nothing_to_other_machines(quartet: Quartet) -> None:
    raw = quartet.raw | {"orchestrator": quartet.raw["orchestrator"] | {"name": "watched", "steps": 2}}
    config = quartet.folder / "watched.yaml"
    config.write_text(yaml.safe_dump(raw))
    running = asyncio.create_task(asyncio.to_thread(command, quartet.folder, "train", str(config)))
    seen: set[Listener] = set()
    opened: list[Listener] = []
    names: set[str] = set()
    drivers: set[int] = set()
    while not running.done():
        drivers |= {process.pid for process in psutil.Process().children(recursive=True)}
        listening = set(listeners(alive(quartet))) - seen
        opened += await asyncio.to_thread(unguarded, listening)
        seen |= listening
        names |= {listener.process for listener in listening}
        await asyncio.sleep(0.2)
    done = await running
    assert done.returncode == 0, done.stderr
    beyond = [listener for listener in seen if not listener.on_loopback]
    print(f"{len(seen)} listeners during a run, {len(beyond)} off loopback, {len(opened)} unauthenticated")
    assert any(name.startswith("ray::Rank") for name in names)
    assert drivers & {listener.pid for listener in seen}
    assert opened == []


@pytest.mark.exhaustive  # the check itself: tests/unit/orchestrator/deployment and the test above
async def test_a_port_that_a_run_opens_ends_it_by_name(quartet: Quartet) -> None:
    """Here by a judge of the user's own, which `quartet train` imports."""
    opening = "import socket\n\nserver = socket.create_server(('0.0.0.0', 0))\n\n\ndef judge(pairs):\n    return []\n"
    (quartet.folder / "opening.py").write_text(opening)
    section = quartet.raw["orchestrator"]
    judged = {"evaluation": section["evaluation"] | {"judges": {"opening": "opening:judge"}}}
    config = quartet.folder / "opening.yaml"
    config.write_text(yaml.safe_dump(quartet.raw | {"orchestrator": section | {"name": "opening"} | judged}))
    done = await asyncio.to_thread(command, quartet.folder, "train", str(config))
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    named = r"0\.0\.0\.0:\d+ of .*python.* \(pid \d+\) answers every caller from other machines Have it listen on"
    assert re.search(named, told), told
    assert "Traceback" not in told
