"""What a run listens on: its learners, its pushes and `quartet train` itself."""

import asyncio
import re

import pytest
import yaml

from tests.cluster import Quartet, command
from tests.runs import Ended


def test_a_run_opens_nothing_to_other_machines(ended: Ended) -> None:
    beyond = [listener for listener in ended.seen if not listener.on_loopback]
    print(f"{len(ended.seen)} listeners, {len(beyond)} off loopback, {len(ended.opened)} unauthenticated")
    assert any(listener.process.startswith("ray::Rank") for listener in ended.seen)
    assert ended.drivers & {listener.pid for listener in ended.seen}
    assert ended.opened == []


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
