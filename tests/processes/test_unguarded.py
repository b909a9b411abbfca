"""A file that leaves the guard out, given to `serve deploy` on a cluster of a user's own: no call is answered."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc import StatusCode

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from orchestrator.deployment.cluster import Cluster, ClusterError
from orchestrator.deployment.listeners import free_ports
from quartet.security.port import CALLBACK_VARIABLE, GUARD, LOCAL_VARIABLE
from tests.configuration import REPO
from tests.unit.front_door import outcome

pytestmark = pytest.mark.exhaustive  # three heads; the proxy and the replica by units

Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a head with these variables."""
    state = tmp_path / ".quartet" / "ray.json"
    with pytest.MonkeyPatch.context() as patch:

        def begin(**variables: str) -> Cluster:
            for name, value in variables.items():
                patch.setenv(name, value)
            return ray_cluster.start(print, state)

        yield begin
        if left := ray_cluster.last(state):
            ray_cluster.stop(left, state)


def write(folder: Path, tokenizer: Path, functions: list[str]) -> tuple[Path, str]:
    """A file with the reward service alone and these functions; its port's address."""
    raw: dict[str, Any] = yaml.safe_load((REPO / "deploy/ppo.yaml").read_text())
    raw["http_options"]["port"], raw["grpc_options"]["port"] = free_ports(2)
    raw["grpc_options"]["grpc_servicer_functions"] = functions
    [reward] = [entry for entry in raw["applications"] if entry["name"] == "reward"]
    scorer = {"kind": "function", "function": "tests.scorers:words"}
    raw["applications"] = [reward | {"args": {"tokenizer": str(tokenizer), "scorer": scorer}}]
    path = folder / "reward.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path, f"127.0.0.1:{raw['grpc_options']['port']}"


async def answer(target: str) -> StatusCode:
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_unary("/quartet.v1.Reward/Info")(b"", metadata=(("application", "reward"),), timeout=10)
        return (await outcome(call))[0]


SERVICE = "protos.reward_pb2_grpc.add_RewardServicer_to_server"


@pytest.mark.parametrize("functions", [[SERVICE], [SERVICE, GUARD]], ids=["missing", "last"])
async def test_a_proxy_with_a_guard_does_not_start(
    start: Start, policy_folder: Path, tmp_path: Path, functions: list[str]
) -> None:
    head = start(**{LOCAL_VARIABLE: "open"})
    file, target = write(tmp_path, policy_folder, functions)
    with pytest.raises(ClusterError, match=rf"grpc_servicer_functions: should begin with {GUARD}"):
        await asyncio.to_thread(serving.deploy, head, file)
    assert await answer(target) is not StatusCode.OK


async def test_behind_a_proxy_without_a_guard_no_replica_starts(
    start: Start, policy_folder: Path, tmp_path: Path
) -> None:
    head = start(**{CALLBACK_VARIABLE: "", LOCAL_VARIABLE: "open"})
    file, target = write(tmp_path, policy_folder, [SERVICE])
    await asyncio.to_thread(serving.deploy, head, file)
    with pytest.raises(ClusterError, match="the gRPC port would be open without a guard; set"):
        await asyncio.to_thread(serving.await_running, head, ("reward",), print, 240)
    assert await answer(target) is not StatusCode.OK
