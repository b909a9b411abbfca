"""A run one of whose services is another application than its own name says, and a replica of it that stands still.

`judge` stands for a service that someone else deployed: it has a target and a name of its own in the run's
configuration. One of its two replicas is stopped with SIGSTOP while the run trains, which goes on by the other one.
The test prints what that cost.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import yaml

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from orchestrator.deployment.redeployment import fixed
from orchestrator.monitoring.metrics import FILE, read_metrics
from tests.cluster import START_S, Quartet, command

STEPS, FREEZE = 14, 5
"""Steps of the run, and after how many of them a replica stands still."""
DEADLINE_S = 60.0
"""Deadline of a call that scores or references; a run that waited for the frozen replica would wait as long."""


def judge(quartet: Quartet, service: str) -> dict[str, Any]:
    """The service as another application, of two replicas."""
    applications: list[dict[str, Any]] = quartet.raw["applications"]
    [deployed] = [application for application in applications if application["name"] == service]
    deployment = deployed["deployments"][0] | fixed(2)
    return deployed | {"name": "judge", "route_prefix": "/judge", "deployments": [deployment]}


# A frozen rollout replica: test_faults.py. Which replica is asked, and asked again: tests/unit/quartet/wire,
# tests/unit/orchestrator/experience.
pytestmark = pytest.mark.exhaustive


@pytest.fixture(params=["reward", "reference"])
def service(quartet: Quartet, request: pytest.FixtureRequest) -> Iterator[str]:
    """A service that runs as the application `judge` besides."""
    name: str = request.param
    quartet.deploy([judge(quartet, name)], name)
    serving.await_running(quartet.cluster, ("judge",), print, START_S)
    yield name
    quartet.deploy([], name)


def configured(quartet: Quartet, service: str) -> Path:
    """A run that uses `judge` in the place of the service."""
    orchestrator = quartet.raw["orchestrator"] | {
        "name": f"judged-{service}",
        "steps": STEPS,
        "services": {service: {"target": quartet.target, "application": "judge"}},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 3},
    }
    path = quartet.folder / f"judged-{service}.yaml"
    path.write_text(yaml.safe_dump(quartet.raw | {"orchestrator": orchestrator}))
    return path


async def freeze(quartet: Quartet, metrics: Path, run: "asyncio.Task[Any]") -> psutil.Process:
    """Stops a replica of `judge` once the run has got so far."""

    def steps() -> float:
        lines = read_metrics(metrics) if metrics.exists() else []
        return lines[-1]["step"] if lines else 0

    while steps() < FREEZE:
        assert not run.done(), run.result().stderr
        await asyncio.sleep(0.1)
    [deployment] = ray_cluster.applications(quartet.cluster)["judge"]["deployments"].values()
    replica = psutil.Process(min(r["pid"] for r in deployment["replicas"] if r["state"] == "RUNNING"))
    replica.send_signal(signal.SIGSTOP)
    return replica


async def test_a_frozen_replica_costs_a_run_seconds_and_no_roll_back(quartet: Quartet, service: str) -> None:
    path = configured(quartet, service)
    metrics = quartet.folder / "runs" / f"judged-{service}" / FILE
    running = asyncio.create_task(asyncio.to_thread(command, quartet.folder, "train", str(path)))
    frozen = await freeze(quartet, metrics, running)
    try:
        done = await running
    finally:
        if frozen.is_running():
            frozen.kill()
    assert done.returncode == 0, done.stderr
    assert "interrupted" not in done.stderr
    lines = [line for line in read_metrics(metrics) if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    seconds = [line["seconds/step"] for line in lines]
    usual = median(seconds[1:FREEZE])
    cost = sum(seconds[FREEZE:]) - usual * (STEPS - FREEZE)
    print(f"\na frozen {service} replica cost {cost:.1f} s in {STEPS - FREEZE} steps of usually {usual:.2f} s")
    print("seconds of each step:", " ".join(f"{value:.1f}" for value in seconds))
    assert max(seconds[FREEZE:]) < DEADLINE_S
