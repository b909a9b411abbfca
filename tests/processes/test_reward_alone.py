"""The reward service alone, as deploy/reward.yaml brings it up: several scorers, and no run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment.listeners import free_ports
from quartet.security.credentials import VARIABLE, connect
from quartet.wire.errors import InvalidArgument
from services.reward.client import RewardClient
from tests import preloaded
from tests.cluster import command, eventually
from tests.configuration import REPO, model_scorer

PAIRS = ["w5 w6"] * 3, ["w7", "w8 w9", "w10 w11 w12"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, reward_folder: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a head that serves the shipped file, and its port."""
    folder = tmp_path_factory.mktemp("alone")
    raw: dict[str, Any] = yaml.safe_load((REPO / "deploy/reward.yaml").read_text())
    raw["http_options"]["port"], raw["grpc_options"]["port"] = free_ports(2)
    [application] = raw["applications"]
    application["args"]["scorers"]["taste"] = model_scorer(reward_folder)
    application["deployments"].append({"name": "taste", "ray_actor_options": {"num_cpus": 0.2}})
    preloaded.preload(application, preloaded.make_folder())
    (folder / "reward.yaml").write_text(yaml.safe_dump(raw))
    checked = command(folder, "check", "reward.yaml")
    assert checked.returncode == 0, checked.stderr
    try:
        up = command(folder, "up", "reward.yaml")
        assert up.returncode == 0, up.stderr
        yield folder, f"127.0.0.1:{raw['grpc_options']['port']}"
    finally:
        down = command(folder, "down")
        assert down.returncode == 0, down.stderr


@pytest.fixture
async def client(place: tuple[Path, str]) -> AsyncIterator[RewardClient]:
    folder, target = place
    async with RewardClient(connect(target, {VARIABLE: str(folder / ".quartet/access")})) as client:
        yield client


def replica(folder: Path, scorer: str) -> int:
    """The process of the scorer's replica that runs, or 0."""
    cluster = ray_cluster.running(folder / ray_cluster.STATE)
    assert cluster
    deployment = ray_cluster.applications(cluster)["reward"]["deployments"][scorer]
    return next((int(one["pid"]) for one in deployment["replicas"] if one["state"] == "RUNNING"), 0)


async def test_scorers_are_chosen_by_name_and_one_that_dies_touches_no_other(
    client: RewardClient, place: tuple[Path, str]
) -> None:
    infos = {each.name: each for each in await client.scorers(60)}
    assert {name: each.identity.name.partition(":")[0] for name, each in infos.items()} == {
        "reviews": "function",
        "sums": "function",
        "taste": "model",
    }
    taste, sums = client.named("taste"), client.named("sums")

    async def added() -> list[float]:
        asked = ["2 + 2 =", "2 + 3 ="], ["4", "6"]
        scores = await sums.score_texts(*asked, labels=["4", "5"], timeout_s=5)
        return [float(score) for score in scores.values]

    assert await added() == [1, 0]
    before = await taste.score_texts(*PAIRS, timeout_s=60)
    assert before.model_hash == infos["taste"].identity.model_hash
    with pytest.raises(InvalidArgument, match="scorer: required, as there are several: reviews, sums, taste"):
        await client.score_texts(*PAIRS, timeout_s=60)
    folder, _ = place
    killed = replica(folder, "taste")
    os.kill(killed, signal.SIGKILL)
    waiting = asyncio.create_task(taste.score_texts(*PAIRS, timeout_s=120))
    for _ in range(20):
        assert await added() == [1, 0]
    after = await waiting
    assert after.values.tolist() == before.values.tolist()

    async def replaced() -> bool:
        return replica(folder, "taste") not in (0, killed)

    await eventually(replaced, 60)
