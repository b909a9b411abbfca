"""Streams of OpenAI's protocol that are left early, while versions are pushed and replicas killed: the command."""

import os
import re
import subprocess
import sys

import pytest

from tests.configuration import REPO


# One push across a stream: tests/e2e/test_openai.py; a killed replica and leaving callers: tests/integration.
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_each_ends_with_an_answer_or_a_reason_and_names_the_versions_of_its_tokens() -> None:
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Folders and tokens are those of the command's own quartet.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "QUARTET_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.streams", "--seconds", "40", "--seed", "1"],
        cwd=REPO,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    for what in ("pushes", "replicas killed", "replies of several versions"):
        assert re.search(rf"{what}\W+[1-9]", done.stdout), done.stdout[-6000:]
