"""Ports of the four services that can be reached from another machine, and their answers to it."""

import os
import re
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment.listeners import listeners
from quartet.security.credentials import VARIABLE
from quartet.security.local import FOLDER
from tests.cluster import SERVICES, Quartet, refused
from tests.configuration import REPO
from tests.http_requests import ask
from tests.strangers import NEEDS, UNREACHABLE, Stranger, stranger


@pytest.fixture
def elsewhere() -> Iterator[Stranger]:
    with stranger() as caller:
        if not caller.namespace:
            print(f"asking at {caller.host} from this machine itself: {NEEDS}")
        yield caller


@pytest.mark.parametrize("path", ["/", "/-/routes", "/-/healthz", "/critic", "/rollout/v1/models", "/rollout/health"])
async def test_the_http_port_answers_no_one_without_the_token(quartet: Quartet, path: str) -> None:
    for headers in ((), (("Authorization", "Bearer guessed"),)):
        assert (await ask(quartet.http, path, None, *headers)).status == 401


def test_the_head_has_a_secret_of_its_own_that_others_cannot_read(quartet: Quartet, tmp_path: Path) -> None:
    """The dashboard and all processes of Ray ask for it; the test of a stranger below asks each of their ports."""
    cluster, other = quartet.cluster, tmp_path / "token"
    assert Path(cluster.token).stat().st_mode & 0o777 == 0o600
    assert Path(cluster.folder).stat().st_mode & 0o777 == 0o700
    assert ray_cluster.applications(cluster).keys() >= {"reward", "critic"}
    other.write_text("a" * len(Path(cluster.token).read_text()))
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        ray_cluster.applications(replace(cluster, token=str(other)))


async def test_another_user_of_this_machine_gets_nothing_and_cannot_read_the_token(quartet: Quartet) -> None:
    """Over loopback, which every user reaches: each service's methods, health and reflection."""
    folder = quartet.folder / FOLDER
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "token")] == [0o700, 0o600]
    asked = [("Reward", "Score"), ("Critic", "Train"), ("Rollout", "UpdateWeights"), ("Reference", "Info")]
    methods = [f"/quartet.v1.{service}/{method}" for service, method in asked]
    metadata = (("application", "reward"),)
    async with grpc.aio.insecure_channel(quartet.target) as channel:
        for method in (*methods, "/grpc.health.v1.Health/Check"):
            for proof in ((), (("authorization", "Bearer guessed"),)):
                answer = channel.unary_unary(method)(b"", metadata=(*metadata, *proof), timeout=30)
                assert (await refused(answer))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (await quartet.services.reward.info(30)).model.vocab_size > 0


def test_a_program_in_the_folder_calls_as_the_page_shows(quartet: Quartet) -> None:
    shown = (REPO / "docs/python.md").read_text().rpartition("```python\n")[2].partition("```")[0]
    program = shown.replace("127.0.0.1:19000", quartet.target)
    assert program != shown
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=quartet.folder,
        env={name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"\[ *-?\d.*\] model:\S+", done.stdout), done.stdout


@pytest.mark.usefixtures("on_ray")
async def test_a_stranger_on_another_machine_gets_nothing(
    quartet: Quartet, elsewhere: Stranger, tmp_path: Path
) -> None:
    """At the ports of every process of the head, and of this one, which has joined it."""
    listening = listeners([psutil.Process(), *quartet.cluster.processes()])
    beyond = [listener for listener in listening if not listener.on_loopback]
    ports = {listener.port for listener in listening}
    assert quartet.raw["grpc_options"]["port"] in ports
    answers = elsewhere.asks(sorted(ports), tmp_path / "planted")
    reached = {port: answer for port, answer in answers.items() if answer != UNREACHABLE}
    print(
        f"{len(listening)} listeners, {len(beyond)} off loopback, {len(reached)} reached from "
        f"{'another network namespace' if elsewhere.namespace else 'this machine'}"
    )
    replicas = {listener.pid for listener in listening if listener.process.startswith("ray::ServeReplica")}
    assert len(replicas) == len(SERVICES) + 1  # two of the rollout service; their own ports are on loopback too
    assert beyond == []
    assert reached == {}
    assert not (tmp_path / "planted").exists()
