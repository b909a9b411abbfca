"""A run that is ended as it opens a port; what any other listens on is in test_train.py."""

import asyncio
import re

import pytest
import yaml

from tests.cluster import Quartet, command


@pytest.mark.exhaustive  # the check itself: tests/unit/orchestrator/deployment and in test_train.py
async def test_a_port_that_a_run_opens_ends_it_by_name(quartet: Quartet) -> None:
    """Opened by a judge of the user's own, which `quartet train` imports."""
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
