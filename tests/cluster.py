"""A whole quartet for tests: a Ray head of its own, the four services with tiny models, and clients of them."""

import asyncio
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil
import pytest
import yaml
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.clients import Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from orchestrator.deployment.listeners import free_ports
from orchestrator.deployment.redeployment import fixed
from protos import rollout_pb2
from quartet.security.credentials import VARIABLE, connect
from quartet.security.keys.folder import Keys
from quartet.security.local import FOLDER
from quartet.security.policy import digest
from quartet.wire.errors import ServiceError
from services.critic.client import CriticClient
from services.reference.client import ReferenceClient
from tests import preloaded
from tests.configuration import REPO, configuration, write_prompts
from tests.crashes import crashes

Reply = TypeVar("Reply", bound=Message)

SERVICES = ("rollout", "reward", "reference", "critic")
START_S = 300
REPLACED_S = 180
"""Serve has started another replica in the place of a lost one by then."""
SECURED = "QUARTET_TEST_SECURED"
"""Environment variable: set, the cluster has TLS and a policy, and the tests and their commands are a trainer."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }} <eos> {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
"""Chat template of the rollout service's model. It ends each message with EOS; `w5` begins a response."""
MARK = "QUARTET_TEST_CLUSTER"
"""Inherited by every process of the cluster, wherever it ends up in the process tree."""


@dataclass(frozen=True, slots=True)
class Quartet:
    """The running services, and how to reach them."""

    folder: Path
    config: Path
    """The deployed YAML: deploy/ppo.yaml with the tests' models, ports and sizes."""
    raw: dict[str, Any]
    """The same as plain values."""
    cluster: ray_cluster.Cluster
    target: str
    imported: Path
    """Folder of the processes that replicas are forks of."""
    policy: Path
    reward: Path
    channel: grpc.aio.Channel
    services: Services

    @property
    def http(self) -> int:
        """The number of the HTTP port."""
        return int(self.raw["http_options"]["port"])

    @property
    def token(self) -> str:
        """The token of a trainer."""
        return (self.folder / FOLDER / "token").read_text()

    @property
    def reference(self) -> ReferenceClient:
        """The reference's client, which this quartet always has."""
        assert self.services.reference is not None
        return self.services.reference

    @property
    def critic(self) -> CriticClient:
        """The critic's client, which this quartet always has."""
        assert self.services.critic is not None
        return self.services.critic

    async def call(self, method: str, request: Any, reply: type[Reply], application: str) -> Reply:
        """One unary RPC as any gRPC client would make it; `request` a message or raw bytes."""
        ask = self.channel.unary_unary(method, request_serializer=_wire, response_deserializer=reply.FromString)
        answer: Reply = await ask(request, metadata=(("application", application),), timeout=120)
        return answer

    async def stream(self, method: str, request: Any, reply: type[Reply], application: str) -> list[Reply]:
        """Like `call`, for an RPC that streams its responses."""
        ask = self.channel.unary_stream(method, request_serializer=_wire, response_deserializer=reply.FromString)
        return [part async for part in ask(request, metadata=(("application", application),), timeout=120)]

    async def health(self, service: str) -> Any:
        """The status that grpc.health.v1 gives, asked without any metadata."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=120)).status

    async def replicas(self, count: int | None = None) -> dict[str, Any]:
        """RolloutInfo of `count` rollout replicas, by name; of as many as the file fixes, if no number is given.

        Info reaches any one of them, so ask until all have answered.
        """
        infos: dict[str, Any] = {}
        count = count or self.rollout_replicas

        async def all_seen() -> bool:
            info = await self.services.rollout.info(30)
            infos[info.replica] = info
            return len(infos) == count

        await eventually(all_seen, 30)
        return infos

    @property
    def rollout_replicas(self) -> int:
        """Number of rollout replicas that were deployed, where it is fixed."""
        scaling = self.raw["applications"][0]["deployments"][0]["autoscaling_config"]
        assert scaling["min_replicas"] == scaling["max_replicas"]
        return int(scaling["max_replicas"])

    def deploy(self, applications: list[dict[str, Any]], name: str) -> None:
        """Deploys `applications` beside the four services; an empty list takes them away again."""
        for application in applications:
            preloaded.preload(application, self.imported)
        path = self.folder / f"{name}.yaml"
        raw = self.raw | {"applications": self.raw["applications"] + applications}
        path.write_text(yaml.safe_dump(raw))
        serving.deploy(self.cluster, path)

    def scorer(self, name: str, **args: Any) -> dict[str, Any]:
        """Another reward application for the YAML, of the policy's tokenizer and these `args:`."""
        return {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": "services.reward.replica:build",
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
            "args": {"tokenizer": str(self.policy), **args},
            "deployments": [
                {"name": each, "ray_actor_options": {"num_cpus": 0.1}} | fixed(1)
                for each in ("Reward", *args.get("scorers", ()))
            ],
        }

    @contextmanager
    def scoring(self, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Context in which such an application runs."""
        application = self.scorer(name, **args)
        self.deploy([application], f"with-{name}")
        try:
            serving.await_running(self.cluster, (name,), print, START_S)
            yield application
        finally:
            self.deploy([], f"without-{name}")


def _wire(request: Any) -> bytes:
    return request if isinstance(request, bytes) else bytes(request.SerializeToString())


async def eventually(check: Callable[[], Awaitable[bool]], timeout_s: float) -> float:
    """Waits until `check` holds; the seconds it took. Fails the test after `timeout_s`."""
    clock = asyncio.get_running_loop().time
    start = clock()
    while not await check():
        assert clock() - start < timeout_s, f"not within {timeout_s:g} s: {check}"
        await asyncio.sleep(0.05)
    return clock() - start


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """Code and message with which a raw RPC is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The `quartet` command, run in `folder`: that is where it keeps .quartet/ and runs/."""
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [str(Path(sys.executable).with_name("quartet")), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@asynccontextmanager
async def running_quartet(
    folder: Path, policy: Path, reward: Path, adapt: Callable[[dict[str, Any]], None] = lambda raw: None
) -> AsyncIterator[Quartet]:
    """`quartet up`, and at the end `quartet down`, which must leave no process behind. `adapt` changes the deployment
    file beforehand, which may have services alone."""
    http, grpc_port = free_ports(2)
    raw = configuration(policy, reward, write_prompts(folder), http, grpc_port)
    raw["applications"][0]["args"]["model"] = str(_with_template(policy, folder / "policy-with-template"))
    raw["security"] = {"http": True}
    run = OrchestratorConfig.parse(raw["orchestrator"], "orchestrator")
    adapt(raw)
    imported = preloaded.make_folder()
    for application in raw["applications"]:
        preloaded.preload(application, imported)
    if os.environ.get(SECURED):
        raw["security"] |= {"policy": str(_secure(folder / "keys", folder / FOLDER))}
    config = folder / "ppo.yaml"
    config.write_text(yaml.safe_dump(raw))
    target = f"127.0.0.1:{grpc_port}"
    mark = uuid.uuid4().hex
    try:
        up = command(folder, "up", str(config), **{MARK: mark})
        assert up.returncode == 0, up.stderr
        if "orchestrator" in raw:  # services alone have no learners, whose libraries take long
            preloaded.preload_learners(imported)
        cluster = ray_cluster.running(folder / ray_cluster.STATE)
        assert cluster
        os.environ.setdefault(VARIABLE, str(folder / ".quartet/access"))  # this process is in another folder
        channel = connect(target)
        yield Quartet(folder, config, raw, cluster, target, imported, policy, reward, channel, Services.connect(run))
        await channel.close()
    finally:
        command(folder, "down")
    assert left_behind(mark) == []
    assert crashes([folder]) == []


def _with_template(policy: Path, folder: Path) -> Path:
    """A copy of the policy with a chat template, which the engine alone uses."""
    shutil.copytree(policy, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _secure(folder: Path, access: Path) -> Path:
    """Makes keys and lets this process, and those that it starts, show a trainer's; the policy. Requests over HTTP,
    which has no certificates, have a token, in the place of the owner's."""
    keys = Keys(folder, days=1)
    keys.make(["127.0.0.1"], {"tests": "trainer"}, tokens=False)
    os.environ[VARIABLE] = str(folder / "clients" / "tests")
    token = uuid.uuid4().hex
    access.mkdir(parents=True)
    (access / "token").write_text(token)
    policy = yaml.safe_load(keys.policy.read_text())
    policy["identities"]["tests-http"] = {"role": "trainer", "tokens": [digest(token)]}
    keys.policy.write_text(yaml.safe_dump(policy))
    return keys.policy


def named(quartet: Quartet, title: str) -> psutil.Process:
    """The Ray worker of the cluster whose title begins so."""
    [only] = titled(quartet, title)
    return psutil.Process(only)


def titled(quartet: Quartet, title: str) -> list[int]:
    """Living processes of the cluster whose title begins so."""
    found = []
    for process in quartet.cluster.processes():
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(title) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def rollouts(quartet: Quartet) -> dict[str, int]:
    """Process ids of the rollout replicas that run, by name."""
    rollout = ray_cluster.applications(quartet.cluster)["rollout"]["deployments"]["Rollout"]
    return {r["replica_id"]: r["pid"] for r in rollout["replicas"] if r["state"] == "RUNNING"}


async def whole(quartet: Quartet, count: int) -> float:
    """Seconds until so many rollout replicas run, and answer as members: Serve tells of a new one a moment after it
    runs, and until then a push passes it over."""

    async def complete() -> bool:
        try:
            pids = rollouts(quartet)
            if len(pids) != count or not all(psutil.pid_exists(pid) for pid in pids.values()):
                return False
            reports = await quartet.services.rollout.update_weights(2, discover=rollout_pb2.Discover())
        except (ServiceError, OSError, KeyError):  # while Serve's controller or its proxy is being replaced
            return False
        return sum(report.ok for report in reports) == count

    return await eventually(complete, REPLACED_S)


def engine_of(pid: int) -> int:
    """The process of a replica's vLLM engine."""
    [engine] = [p for p in psutil.Process(pid).children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
    return preloaded.fork_of(engine).pid


def left_behind(mark: str) -> list[str]:
    """Command lines of the living processes that inherited `mark`."""
    left = []
    for process in inherited(mark):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            left.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
    return left


def inherited(mark: str) -> list[psutil.Process]:
    """The living processes that inherited the environment variable MARK with this value."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
