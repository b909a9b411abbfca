"""A function that never returns, in a real replica of Serve."""

import asyncio
from pathlib import Path

import psutil
import pytest
from grpc_health.v1 import health_pb2

from orchestrator.deployment import cluster as ray_cluster
from services.reward.client import RewardClient
from tests.cluster import Quartet, eventually


def replica(quartet: Quartet) -> int:
    """The process of the replica that runs, or 0."""
    [deployment] = ray_cluster.applications(quartet.cluster)["hangs"]["deployments"].values()
    running = [one["pid"] for one in deployment["replicas"] if one["state"] == "RUNNING"]
    return int(running[0]) if running else 0


@pytest.mark.exhaustive  # the same without Serve by units
@pytest.mark.timeout(300)
async def test_a_function_that_hangs_costs_its_pair_and_nothing_of_the_replica(
    quartet: Quartet, tmp_path: Path
) -> None:
    """The worker processes end with the replica, which is killed."""
    reached = tmp_path / "reached"
    client = RewardClient(quartet.channel, "hangs")

    async def hangs() -> bool:
        return reached.exists()

    function = {"kind": "function", "function": "tests.scorers:hangs", "pair_timeout_s": 6.0}
    with quartet.scoring("hangs", scorer=function):
        before = replica(quartet)
        hung = asyncio.create_task(
            client.score_texts(["w5", "w13"], ["w7", "w7"], labels=["", str(reached)], timeout_s=120)
        )
        await eventually(hangs, 60)
        assert (await client.score_texts(["w5"], ["w7"], timeout_s=60)).values.tolist() == [1.0]
        assert not hung.done()
        assert await quartet.health("hangs") == health_pb2.HealthCheckResponse.SERVING
        scores = await hung
        assert (scores.values[0], [*scores.unscored]) == (1.0, [1])
        assert "timeout: tests.scorers:hangs took longer for a pair than pair_timeout_s, 6 s" in str(
            scores.unscored[1]
        )
        assert replica(quartet) == before
        workers = psutil.Process(before).children()
        assert workers
        psutil.Process(before).kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 30)
        assert not alive
