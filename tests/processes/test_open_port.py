"""deploy/ppo-open.yaml on a Ray head of its own: the reward service behind TLS and a policy."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from orchestrator.deployment.listeners import free_ports, listeners, unguarded
from protos import reward_pb2
from services.common.security.credentials import VARIABLE, connect
from services.common.security.identity import Role
from services.common.security.keys.folder import Keys
from services.common.security.port import SecurityConfig
from services.common.wire.errors import PermissionDenied, Unauthenticated, Unavailable
from services.reward.client import RewardClient
from tests.configuration import REPO, model_scorer

CALLERS: dict[str, Role] = {"run-a": "trainer", "evaluator": "judge-client", "pager": "prober"}
PAIRS: dict[str, Any] = {"prompts": [np.array([5, 6], np.int32)], "responses": [np.array([7, 8], np.int32)]}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("open") / "keys", days=1)
    made.make(["127.0.0.1"], CALLERS, tokens=False)
    return made


@pytest.fixture(scope="module")
def target(keys: Keys, policy_folder: Path, reward_folder: Path) -> Iterator[str]:
    """The reward application of the shipped file, open on every address of this machine."""
    folder = keys.folder.parent
    raw = yaml.safe_load((REPO / "deploy/ppo-open.yaml").read_text())
    http, number = free_ports(2)
    raw["http_options"]["port"], raw["grpc_options"]["port"] = http, number
    [reward] = [entry for entry in raw["applications"] if entry["name"] == "reward"]
    reward["args"] = {"tokenizer": str(policy_folder), "scorer": model_scorer(reward_folder)}
    raw["applications"] = [reward]
    served, state = folder / "open.yaml", folder / "ray.json"
    served.write_text(yaml.safe_dump(raw))
    port = SecurityConfig.parse(raw["security"] | {"policy": str(keys.policy)}, "security").port
    assert port.host == "0.0.0.0"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in port.environment.items():
            patch.setenv(name, value)
        head = ray_cluster.start(print, state)
        try:
            serving.deploy(head, served)
            serving.await_running(head, ("reward",), print, 300)
            yield f"127.0.0.1:{number}"
        finally:
            ray_cluster.stop(head, state)


@pytest.fixture
async def channels(keys: Keys, target: str) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    opened = {name: connect(target, {VARIABLE: str(keys.folder / "clients" / name)}) for name in CALLERS}
    opened["plaintext"] = grpc.aio.insecure_channel(target)
    authority = (keys.folder / "ca/ca.pem").read_bytes()
    opened["stranger"] = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority))
    yield opened
    for channel in opened.values():
        await channel.close()


@pytest.mark.parametrize("name", ["run-a", "evaluator"])
async def test_those_who_may_are_scored(channels: dict[str, grpc.aio.Channel], name: str) -> None:
    client = RewardClient(channels[name])
    assert len((await client.score(**PAIRS, timeout_s=120)).values) == 1
    assert (await client.info(30)).model.vocab_size


async def test_the_prober_learns_of_health_and_nothing_else(channels: dict[str, grpc.aio.Channel]) -> None:
    stub = health_pb2_grpc.HealthStub(channels["pager"])
    assert (await stub.Check(health_pb2.HealthCheckRequest(service="quartet.v1.Reward"), timeout=30)).status == 1
    with pytest.raises(PermissionDenied, match="pager has the role prober, which may not call quartet"):
        await RewardClient(channels["pager"]).score(**PAIRS, timeout_s=120)


@pytest.mark.parametrize("name", ["plaintext", "stranger"])
async def test_no_call_comes_in_without_a_certificate(channels: dict[str, grpc.aio.Channel], name: str) -> None:
    with pytest.raises((Unavailable, Unauthenticated)):
        await RewardClient(channels[name]).score(**PAIRS, timeout_s=3)


async def test_nothing_else_is_open_and_the_port_refuses_those_it_does_not_know(target: str, keys: Keys) -> None:
    head = ray_cluster.running(keys.folder.parent / "ray.json")
    assert head
    listening = listeners(head.processes())
    port = int(target.rpartition(":")[2])
    assert any(listener.port == port and not listener.on_loopback for listener in listening)
    assert await asyncio.to_thread(unguarded, listening) == []


async def test_a_role_is_asked_for_before_an_application(channels: dict[str, grpc.aio.Channel]) -> None:
    call = {"metadata": (("application", "reward"),), "timeout": 30}
    for method in ("/quartet.v1.Critic/Save", "/quartet.v1.Rollout/UpdateWeights", "/quartet.v1.Rollout/Info"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channels["evaluator"].unary_unary(method)(b"", **call)
        assert caught.value.code() is StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channels["run-a"].unary_unary(method)(b"", **call)
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT  # it may, and asks the wrong application
    ask = channels["run-a"].unary_unary("/quartet.v1.Reward/Info", None, reward_pb2.RewardInfo.FromString)
    assert (await ask(b"", **call)).model.vocab_size
