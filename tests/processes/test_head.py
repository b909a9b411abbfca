"""A Ray head of a folder, with the open port of deploy/ppo-open.yaml: who may talk to either, and what it leaves.

The port is that of the reward service, behind TLS and a policy.
"""

import resource
import urllib.error
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from orchestrator.deployment.cluster import Cluster
from orchestrator.deployment.listeners import PortError, check_closed, free_ports, listeners
from protos import reward_pb2
from quartet.security.credentials import VARIABLE, connect
from quartet.security.identity import Role
from quartet.security.keys.folder import Keys
from quartet.security.port import Port
from quartet.wire.errors import PermissionDenied, Unauthenticated, Unavailable
from services.reward.client import RewardClient
from tests.configuration import REPO, model_scorer
from tests.trajectories import of

pytestmark = pytest.mark.exhaustive  # the port by units; the shared head: tests/integration/test_closed.py

CALLERS: dict[str, Role] = {"run-a": "trainer", "evaluator": "judge-client", "pager": "prober"}
PAIRS = of([[5, 6]], [[7, 8]])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("open") / "keys", days=1)
    made.make(["127.0.0.1"], CALLERS, tokens=False)
    return made


@pytest.fixture(scope="module")
def port(keys: Keys) -> Port:
    """Open on every address of this machine to those whom the policy names."""
    port = Port.parse(shipped()["security"] | {"policy": str(keys.policy)}, "security")
    assert port.host == "0.0.0.0"
    return port


def shipped() -> dict[str, Any]:
    """deploy/ppo-open.yaml."""
    return dict(yaml.safe_load((REPO / "deploy/ppo-open.yaml").read_text()))


@dataclass(frozen=True)
class Head:
    """The head and the folders that it may write to."""

    cluster: Cluster
    state: Path
    home: Path


@pytest.fixture(scope="module")
def head(keys: Keys, port: Port) -> Iterator[Head]:
    """A cluster without services."""
    home, state = keys.folder.parent / "home", keys.folder.parent / ".quartet" / "ray.json"
    home.mkdir()
    environment = port.environment | {"HOME": str(home), "RAY_AUTH_TOKEN": "of something else that this user runs"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        cluster = ray_cluster.start(print, state)
        try:
            yield Head(cluster, state, home)
        finally:
            if cluster.alive:
                ray_cluster.stop(cluster, state)


@pytest.fixture(scope="module")
def target(head: Head, policy_folder: Path, reward_folder: Path) -> str:
    """The reward application of the shipped file."""
    raw = shipped()
    http, number = free_ports(2)
    raw["http_options"]["port"], raw["grpc_options"]["port"] = http, number
    [reward] = [entry for entry in raw["applications"] if entry["name"] == "reward"]
    reward["args"] = {"tokenizer": str(policy_folder), "scorer": model_scorer(reward_folder)}
    raw["applications"] = [reward]
    served = head.home.with_name("open.yaml")
    served.write_text(yaml.safe_dump(raw))
    serving.deploy(head.cluster, served)
    serving.await_running(head.cluster, ("reward",), print, 300)
    return f"127.0.0.1:{number}"


@pytest.fixture
async def channels(keys: Keys, target: str) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    opened = {name: connect(target, {VARIABLE: str(keys.folder / "clients" / name)}) for name in CALLERS}
    opened["plaintext"] = grpc.aio.insecure_channel(target)
    authority = (keys.folder / "ca/ca.pem").read_bytes()
    opened["stranger"] = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority))
    yield opened
    for channel in opened.values():
        await channel.close()


def test_it_has_a_secret_of_its_own(head: Head) -> None:
    cluster, token = head.cluster, Path(head.cluster.token)
    assert ray_cluster.applications(cluster) == {}
    assert ray_cluster.start(print, head.state) == cluster
    assert token.stat().st_mode & 0o777 == 0o600
    assert {path.stat().st_mode & 0o777 for path in (Path(cluster.folder), head.state.parent)} == {0o700}
    family = cluster.processes()
    assert cluster.pid in {process.pid for process in family}
    assert {"raylet", "gcs_server"} <= {process.name() for process in family}
    secret = token.read_text()
    token.write_text("another")
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        ray_cluster.applications(cluster)
    token.write_text(secret)


def test_its_processes_may_open_as_many_files_as_the_system_lets_them(head: Head) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {process.name(): process.rlimit(psutil.RLIMIT_NOFILE)[0] for process in head.cluster.processes()}
    assert limits.keys() >= {"raylet", "gcs_server"}
    assert set(limits.values()) == {min(hard, 65_536)}


@pytest.mark.parametrize("name", ["run-a", "evaluator"])
async def test_those_who_may_are_scored(channels: dict[str, grpc.aio.Channel], name: str) -> None:
    client = RewardClient(channels[name])
    assert len((await client.score(PAIRS, timeout_s=120)).values) == 1
    assert (await client.info(30)).model.vocab_size


async def test_the_prober_learns_of_health_and_nothing_else(channels: dict[str, grpc.aio.Channel]) -> None:
    stub = health_pb2_grpc.HealthStub(channels["pager"])
    assert (await stub.Check(health_pb2.HealthCheckRequest(service="quartet.v1.Reward"), timeout=30)).status == 1
    with pytest.raises(PermissionDenied, match="pager has the role prober, which may not call quartet"):
        await RewardClient(channels["pager"]).score(PAIRS, timeout_s=120)


@pytest.mark.parametrize("name", ["plaintext", "stranger"])
async def test_no_call_comes_in_without_a_certificate(channels: dict[str, grpc.aio.Channel], name: str) -> None:
    with pytest.raises((Unavailable, Unauthenticated)):
        await RewardClient(channels[name]).score(PAIRS, timeout_s=3)


def test_nothing_else_is_open(head: Head, target: str) -> None:
    port = int(target.rpartition(":")[2])
    beyond = {listener.port for listener in listeners(head.cluster.processes()) if not listener.on_loopback}
    assert beyond == {port}
    check_closed(head.cluster.processes(), port)
    with pytest.raises(PortError, match=rf":{port} of .* can be reached from other machines"):
        check_closed(head.cluster.processes())


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
    [scorer] = (await ask(b"", **call)).scorers
    assert scorer.model.vocab_size


@pytest.mark.usefixtures("target")
def test_it_leaves_its_logs_only_and_the_home_folder_alone(head: Head) -> None:
    family = head.cluster.processes()
    ray_cluster.stop(head.cluster, head.state)
    assert list(head.home.iterdir()) == []
    assert sorted(path.name for path in head.state.parent.iterdir()) == ["lock", "logs", "ray.log"]
    assert (head.state.parent / "logs" / "gcs_server.out").exists()
    assert not Path(head.cluster.folder).exists()
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
