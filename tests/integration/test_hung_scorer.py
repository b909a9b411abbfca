"""A scorer that never returns, in a real replica of Serve."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from protos import reward_pb2
from quartet.wire.codec import unpack_floats
from tests.cluster import Quartet, eventually, refused

METHOD = "/quartet.v1.Reward/Score"
WITHIN_S = 60


def application(quartet: Quartet) -> dict[str, Any]:
    """A reward application whose scorer hangs on the prompt w13."""
    return {
        "name": "hangs",
        "route_prefix": "/hangs",
        "import_path": "services.reward.replica:build",
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
        "args": {
            "tokenizer": str(quartet.policy),
            "scorer": {"kind": "function", "function": "tests.scorers:hangs"},
            "limits": {"batch_s": 8},
        },
        "deployments": [{"name": "Reward", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}],
    }


def replica(quartet: Quartet) -> int:
    """The process of the replica that runs, or 0."""
    [deployment] = ray_cluster.applications(quartet.cluster)["hangs"]["deployments"].values()
    running = [one["pid"] for one in deployment["replicas"] if one["state"] == "RUNNING"]
    return int(running[0]) if running else 0


async def score(quartet: Quartet, prompt: str, label: str = "") -> list[float]:
    texts = reward_pb2.TextPairs(prompts=[prompt], responses=["w7"])
    request = reward_pb2.ScoreRequest(texts=texts, labels=[label])
    reply = await quartet.call(METHOD, request, reward_pb2.ScoreResponse, "hangs")
    return list(unpack_floats(reply.scores, "scores").tolist())


@pytest.mark.exhaustive  # the answer by units; a replica that Serve finds ill and replaces: test_faults.py
@pytest.mark.timeout(300)
async def test_a_hung_scorer_answers_its_callers_and_is_replaced(quartet: Quartet, tmp_path: Path) -> None:
    reached = tmp_path / "reached"

    async def hangs() -> bool:
        return reached.exists()

    quartet.deploy([application(quartet)], "hangs")
    try:
        serving.await_running(quartet.cluster, ("hangs",), print, 120)
        assert await score(quartet, "w5") == [1.0]
        before = replica(quartet)
        began = time.monotonic()
        hung = asyncio.create_task(refused(score(quartet, "w13", str(reached))))
        await eventually(hangs, 60)
        # Health answers while the pass runs.
        assert await quartet.health("hangs") == health_pb2.HealthCheckResponse.SERVING
        behind = asyncio.create_task(refused(score(quartet, "w5")))
        for call in (hung, behind):
            code, details = await call
            assert code is grpc.StatusCode.UNAVAILABLE, details
            assert "will be replaced" in details
        answered_s = time.monotonic() - began

        async def replaced() -> bool:
            return replica(quartet) not in (0, before)

        await eventually(replaced, 120)
        assert await score(quartet, "w5") == [1.0]
        took_s = time.monotonic() - began
        print(f"callers of a hung scorer answered after {answered_s:.1f} s, replica replaced after {took_s:.1f} s")
        assert took_s < WITHIN_S
    finally:
        quartet.deploy([], "as-before")
