"""`quartet up` of services without a run: it waits until the port says that they are healthy."""

import asyncio
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.commands import up
from orchestrator.deployment import cluster
from orchestrator.deployment.facts.render import render
from orchestrator.deployment.file import ServicesFile, load_file
from orchestrator.deployment.listeners import PortError
from protos import reward_pb2, reward_pb2_grpc
from quartet.config.base import ConfigError
from quartet.security.credentials import VARIABLE
from quartet.security.port import HOST_VARIABLE, POLICY_VARIABLE
from quartet.wire.errors import Unavailable
from services.reward.kinds import FunctionScorerConfig


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """An application that becomes healthy when it has been asked `after` times."""

    def __init__(self, after: int) -> None:
        self.asked: list[str] = []
        self._after = after

    async def Check(self, request: Any, context: Any) -> Any:
        self.asked.append(request.service)
        serving = len(self.asked) > self._after
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if serving else status.NOT_SERVING)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    made = grpc.aio.server()
    yield made
    await made.stop(None)


async def served(server: grpc.aio.Server, health: Health, folder: Path) -> ServicesFile:
    """A file of scorers whose port this server listens on."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    path = folder / "alone.yaml"
    path.write_text(yaml.safe_dump({"scorers": {"rules": "tests.scorers:count"}, "port": port}))
    return load_file(path)


def test_on_a_cluster_of_ones_own_the_command_is_that_for_the_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    facts, whole = tmp_path / "facts.yaml", tmp_path / "whole.yaml"
    facts.write_text(yaml.safe_dump({"scorers": {"rules": "tests.scorers:count"}}))
    whole.write_text(render(facts))
    rendered = f"`quartet render {facts} > serve.yaml && serve deploy serve.yaml`"
    for path, command in ((facts, rendered), (whole, f"`serve deploy {whole}`")):
        with pytest.raises(ConfigError, match=re.escape(f"deploy to that cluster with {command}, or unset it")):
            up._check_place(load_file(path))


def test_a_port_that_is_taken_is_named_as_the_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port, free = (server.getsockname()[1] for server in (other, closed))
        file = {"scorers": {"rules": "tests.scorers:count"}, "port": port, "http_port": free}
        (tmp_path / "alone.yaml").write_text(yaml.safe_dump(file))
        with pytest.raises(PortError, match=f"^port: {port} cannot be used: .*; choose another$"):
            up.up(Path("alone.yaml"), 1, print)
    assert not (tmp_path / ".quartet").exists()


def test_a_second_call_in_one_process_finds_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a section `security` would take variables of the first for a policy of the user's own."""

    class Started(Exception):
        pass

    given: list[Mapping[str, str]] = []

    def start(say: Any, *, promised: Any, variables: Mapping[str, str]) -> None:
        given.append(variables)
        raise Started

    monkeypatch.chdir(tmp_path)
    for variable in (VARIABLE, POLICY_VARIABLE, HOST_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(up, "check_ports", lambda ports: None)  # Quartet may run on this machine
    monkeypatch.setattr(cluster, "start", start)
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump({"scorers": {"rules": "tests.scorers:count"}}))
    before = dict(os.environ)
    for _ in range(2):
        with pytest.raises(Started):
            up.up(Path("alone.yaml"), 1, print)
    assert given[0] == given[1]
    assert Path(given[0][POLICY_VARIABLE]).is_relative_to(tmp_path / ".quartet")
    assert dict(os.environ) == before


async def test_an_application_that_is_not_healthy_yet_is_waited_for(server: Any, tmp_path: Path) -> None:
    health, said = Health(after=2), list[str]()
    await up._ask_all(await served(server, health, tmp_path), said.append, 20)
    assert health.asked == ["reward"] * 3
    assert "reward.Check: its model does not work; the services' logs say why" in said[0]


class Scorer(reward_pb2_grpc.RewardServicer):  # type: ignore[misc]
    """A reward application with the scorer of `served`, read when its module was as `digest` says."""

    def __init__(self, digest: str) -> None:
        self._digest = digest

    async def Info(self, request: Any, context: Any) -> Any:
        identity = reward_pb2.ScorerIdentity(name="function:tests.scorers:count", model_hash=self._digest)
        return reward_pb2.RewardInfo(scorers=[reward_pb2.ScorerInfo(name="rules", identity=identity)])


OWN = FunctionScorerConfig(kind="function", function="tests.scorers:count").code_hash("scorer")


@pytest.mark.parametrize(("digest", "told"), [(OWN, 0), ("another", 1)])
async def test_a_scorer_that_goes_on_with_the_code_of_before_is_named(
    server: Any, tmp_path: Path, digest: str, told: int
) -> None:
    said = list[str]()
    reward_pb2_grpc.add_RewardServicer_to_server(Scorer(digest), server)  # type: ignore[no-untyped-call]
    file = await served(server, Health(after=0), tmp_path)
    await up._ask_all(file, lambda text: said.append(file.worded(text)), 20)
    assert [line.partition(" since ")[0] for line in said] == [
        "scorers.rules.function: tests.scorers:count has changed"
    ] * told


async def test_one_that_stays_so_ends_the_wait(server: Any, tmp_path: Path) -> None:
    file = await served(server, Health(after=1 << 30), tmp_path)
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable, match=r"reward.Check: its model does not work; .*; waited 0.5 s \(--timeout"):
            await up._ask_all(file, lambda text: None, 0.5)


async def test_a_port_that_nothing_listens_on_is_unavailable(server: Any, tmp_path: Path) -> None:
    file = await served(server, Health(after=0), tmp_path)
    await server.stop(None)
    with pytest.raises(Unavailable, match=r"^reward.Check: "):
        await up._ask_all(file, lambda text: None, 0.5)
