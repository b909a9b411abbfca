"""The consequences that `quartet up` names before it changes services that run."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.clients import Services
from orchestrator.commands import lease, up
from orchestrator.commands.up import consequences
from orchestrator.deployment import cluster, serving
from orchestrator.deployment.cluster import Cluster
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.redeployment import kept, scalable
from quartet.config.base import ConfigError
from quartet.security import local
from quartet.wire.errors import DeadlineExceeded, Unavailable
from services.reward.config import RewardConfig
from tests.gpu_requests import load
from tests.unit.virtual_time import in_virtual_time

SHIPPED = Path(__file__).parents[4] / "deploy" / "ppo.yaml"
HEAD = Cluster(1, 0.0, "127.0.0.1:1", "http://127.0.0.1:2", "token", "folder", "secret")

PORTS = {"http_options": {"host": "127.0.0.1", "port": 18000, "root_path": ""}, "grpc_options": {"port": 19000}}
"""Ports of the shipped file, and more, as Serve describes them."""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """deploy/ppo.yaml; its services run with another dtype of the reference, and one replica of rollout more."""
    loaded = load(SHIPPED, tmp_path)
    described: dict[str, Any] = {}
    for section in yaml.safe_load(loaded.path.read_text())["applications"]:
        if section["name"] == "rollout":
            section["deployments"][0]["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 2}
        described[section["name"]] = {"deployed_app_config": scalable(section), "deployments": {}}
    monkeypatch.setattr(cluster, "serve", lambda ray: PORTS | {"applications": described})
    return loaded


def running(monkeypatch: pytest.MonkeyPatch, run: str) -> list[int]:
    """Lets the services answer that this run holds them; grows by an item when they are asked."""
    asked: list[int] = []

    async def held(services: Services) -> str:
        asked.append(1)
        return run

    monkeypatch.setattr(lease, "training", held)
    return asked


def test_a_change_that_only_scales_does_not_ask_who_trains(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = running(monkeypatch, "demo-1")
    assert consequences(HEAD, deployment).told == [
        "rollout: from 2 replicas to 1 replica; those that stay are not restarted"
    ]
    assert asked == []


def test_a_restart_under_a_run_is_told_plainly(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    [reference] = [entry for entry in deployment.raw["applications"] if entry["name"] == "reference"]
    reference["args"]["dtype"] = "bfloat16"
    running(monkeypatch, "demo-1")
    scaled, restarted, run = consequences(HEAD, deployment).told
    assert scaled.startswith("rollout: from 2 replicas to 1 replica")
    assert restarted.startswith("reference: its replicas, which are not up yet, will be restarted, because of args.d")
    assert run.startswith("run demo-1 is training with these services; it waits for restarted replicas, ")
    running(monkeypatch, "")
    assert consequences(HEAD, deployment) == ([], [scaled, restarted])


def test_a_dashboard_that_does_not_answer_is_told(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(ray: Cluster) -> dict[str, Any]:
        raise TimeoutError("timed out")

    monkeypatch.setattr(cluster, "serve", silent)
    assert consequences(HEAD, deployment).told == [
        "what will change is not known, as Ray's dashboard does not answer (timed out)"
    ]


def test_ports_that_serve_would_keep_are_refused(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment.raw["grpc_options"]["port"] = 19500
    refused = "grpc_options.port: 19500, but Serve runs with 19000 and keeps it; `quartet down` first"
    assert consequences(HEAD, deployment) == ([refused], [])
    monkeypatch.setattr(cluster, "serve", lambda ray: {"grpc_options": None, "applications": {}})  # nothing deployed
    assert consequences(HEAD, deployment) == ([], [])


def test_a_port_may_have_more_services_than_the_file_and_not_fewer(deployment: Deployment) -> None:
    """Another algorithm may have no critic."""
    port: dict[str, Any] = deployment.raw["grpc_options"]
    *functions, health = port["grpc_servicer_functions"]
    critic = "protos.critic_pb2_grpc.add_CriticServicer_to_server"
    has = {"grpc_options": {"grpc_servicer_functions": [*functions, health]}}
    port["grpc_servicer_functions"] = [each for each in functions if each != critic]
    assert kept(has, deployment.raw) == []
    del has["grpc_options"]["grpc_servicer_functions"][functions.index(critic)]
    port["grpc_servicer_functions"] = [*functions, health]
    assert kept(has, deployment.raw) == [
        f"grpc_options.grpc_servicer_functions: Serve runs without {critic} and keeps it so; `quartet down` first"
    ]


@pytest.mark.parametrize("port", [19000, 19500])
def test_up_asks_the_dashboard_once_and_deploys_only_what_serve_takes(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    deployment.raw["grpc_options"]["port"] = port
    auto = {"gradient_checkpointing": "auto"}
    deployment.raw["orchestrator"]["policy"] |= auto
    policy = deployment.orchestrator.policy.model_copy(update=auto)
    deployment = replace(deployment, orchestrator=deployment.orchestrator.model_copy(update={"policy": policy}))
    asked, said, deployed = list[Cluster](), list[str](), list[Path]()
    describe = cluster.serve

    def counted(ray: Cluster) -> dict[str, Any]:
        asked.append(ray)
        return describe(ray)

    class Deployed(Exception):
        """The end of the test: the file has been given to Serve."""

    def deploy(ray: Cluster, config: Path, contents: Any, say: Any, timeout_s: float) -> None:
        deployed.append(config)
        # No learner has a GPU here.
        assert contents["orchestrator"]["policy"]["gradient_checkpointing"] is False
        raise Deployed

    monkeypatch.setattr(up, "load_file", lambda path, check_services: deployment)
    monkeypatch.setattr(cluster, "running", lambda: HEAD)
    monkeypatch.setattr(cluster, "start", lambda say, promised, variables: HEAD)
    monkeypatch.setattr(cluster, "check_environment", lambda ray, wanted: None)
    monkeypatch.setattr(cluster, "serve", counted)
    monkeypatch.setattr(up, "_check_startable", lambda deployment: None)
    monkeypatch.setattr(local, "let_owner_in", lambda port: None)
    monkeypatch.setattr(serving, "deploy", deploy)
    refused = port == 19500
    with pytest.raises(ConfigError, match="keeps it") if refused else pytest.raises(Deployed):
        up.up(deployment.path, 60, said.append)
    assert asked == [HEAD]
    assert deployed == ([] if refused else [deployment.path])
    assert len(said) == (0 if refused else 1)


class Silent:
    """Services of which one does not answer."""

    def __init__(self) -> None:
        self.closed = False

    async def infos(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        raise ExceptionGroup("", [DeadlineExceeded("critic.Info: no answer")])

    async def check_tls(self, config: Any) -> None:
        """Finds nothing wrong."""

    async def close(self) -> None:
        self.closed = True


@in_virtual_time
async def test_the_wait_for_answers_is_told_every_ten_seconds_and_ends_with_the_name_of_its_option(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, said = Silent(), list[str]()
    monkeypatch.setattr(Services, "connect", lambda config: services)
    with pytest.raises(Unavailable, match=r"^critic\.Info: no answer; waited 60 s \(--timeout-s\)$"):
        await up._ask_all(deployment, said.append, 60)
    assert 4 <= len(said) <= 7
    assert {line.partition(": ")[2] for line in said} == {"critic.Info: no answer"}
    assert services.closed


def test_the_addresses_for_clients_of_openais_protocol_are_those_of_the_rollout_applications(
    deployment: Deployment,
) -> None:
    assert up.openai_addresses(deployment) == ["http://127.0.0.1:18000/rollout/v1"]
    assert deployment.http_addresses(RewardConfig) == {"reward": "http://127.0.0.1:18000/reward"}
    first, *others = deployment.raw["applications"]
    at_the_root = replace(deployment, raw=deployment.raw | {"applications": [first | {"route_prefix": "/"}, *others]})
    assert up.openai_addresses(at_the_root) == ["http://127.0.0.1:18000/v1"]
