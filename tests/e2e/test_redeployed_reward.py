"""A reward service that gives other scores from some moment on, because another scorer was deployed."""

import asyncio
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from orchestrator.deployment import serving
from tests.cluster import START_S, Quartet, command
from tests.commands import PATIENCE_S
from tests.runs import Run

LONG = 500
"""Steps that no test waits for."""


@pytest.fixture
def redeploy(quartet: Quartet) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Deploys the reward service with another scorer; at the end with its own again."""

    def deploy(scorer: dict[str, Any]) -> None:
        raw = copy.deepcopy(quartet.raw)
        reward = next(application for application in raw["applications"] if application["name"] == "reward")
        reward["args"]["scorer"] = scorer
        path = quartet.folder / "redeployed-reward.yaml"
        path.write_text(yaml.safe_dump(raw))
        serving.deploy(quartet.cluster, path)
        names = tuple(application["name"] for application in raw["applications"])
        serving.await_running(quartet.cluster, names, print, START_S)

    reward = next(application for application in quartet.raw["applications"] if application["name"] == "reward")
    yield deploy
    deploy(reward["args"]["scorer"])


@pytest.mark.exhaustive  # three runs; the comparison itself: tests/unit/orchestrator/loop/test_watch.py
async def test_it_ends_the_run_by_name_and_goes_on_when_it_is_accepted(
    quartet: Quartet, redeploy: Callable[[dict[str, Any]], None]
) -> None:
    run = Run(quartet, "redeployed")
    with run.changing() as raw:
        raw["orchestrator"]["steps"] = LONG
    process = run.start()
    try:
        run.wait(run.reached(2), process)
        await asyncio.to_thread(redeploy, {"kind": "function", "function": "tests.scorers:count"})
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
    finally:
        run.end()
    told = " ".join(run.log.read_text().split())
    assert "reward" in told
    assert "tests.scorers:count" in told
    assert "--resume --accept-changed-services" in told
    assert "Traceback" not in told

    steps = max(run.steps())
    with run.changing() as raw:
        raw["orchestrator"]["steps"] = steps + 1
    refused = await asyncio.to_thread(command, quartet.folder, "train", str(run.config), "--resume")
    assert refused.returncode == 1
    assert "or give --accept-changed-services" in " ".join(refused.stderr.split())
    await asyncio.to_thread(run.finish, "--resume", "--accept-changed-services")
    assert max(run.steps()) == steps + 1
