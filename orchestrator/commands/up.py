"""`quartet up`: starts the services of a file on a local Ray head and waits until every model answers."""

import asyncio
import contextlib
import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.clients import Infos, Services
from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment import cluster, serving
from orchestrator.deployment.file import Deployment, ServicesFile, load_file
from orchestrator.deployment.listeners import PortError, check_closed, check_ports
from orchestrator.deployment.redeployment import changes, kept
from quartet.config.base import ConfigError
from quartet.security import credentials, local
from quartet.security.credentials import VARIABLE as CREDENTIALS
from quartet.security.port import on_loopback
from quartet.wire.errors import ServiceError, Unavailable, from_rpc
from services.reward.client import RewardClient
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig

_MEANWHILE = (
    "it waits for restarted replicas, goes back to its last checkpoint if the critic is among them, and ends "
    "if reward or reference come back with another model"
)
"""Behaviour of a run while services restart."""
DESCRIBED_S = 10
"""Longest wait, in seconds, for scorers that are healthy to describe themselves."""


def up(config: Path, timeout_s: float, say: Callable[[str], None]) -> None:
    """Starts a head unless one runs, deploys the services and waits until they answer.

    Raises:
        ConfigError, PortError, ClusterError: the file, a port or a service is wrong; the message says how.
    """
    written = load_file(config, check_services=True)
    with written.naming():
        _up(_decided(written), timeout_s, lambda text: say(written.worded(text)))


def _up(deployment: ServicesFile, timeout_s: float, say: Callable[[str], None]) -> None:
    if deployment.port.policy and not os.environ.get(CREDENTIALS):
        raise ConfigError(
            f"{CREDENTIALS}: unset, and {deployment.port.policy} refuses callers without credentials; set it to the "
            "folder of a caller of `quartet keys`, in any role: `up` asks the services whether they answer"
        )
    fresh = cluster.running() is None
    if fresh:
        _check_place(deployment)
    _check_startable(deployment)
    port = deployment.port
    if port.wants_token:
        port = port.model_copy(update={"policy": local.policy_in()})
    # Not set in this process, where the next file without a section `security` would take them for the user's.
    ray = cluster.start(say, promised=deployment.ports.values(), variables=port.environment)
    cluster.check_environment(ray, port.environment)
    if port is not deployment.port:
        local.let_owner_in(deployment.ports["grpc_options.port"])
    if not fresh:
        refused, told = consequences(ray, deployment)
        if refused:
            raise ConfigError("\n".join(refused))
        for line in told:
            say(line)
    serving.deploy(ray, deployment.path, deployment.raw, say, timeout_s)
    serving.await_running(ray, deployment.applications, say, timeout_s)
    asyncio.run(_ask_all(deployment, say, timeout_s))
    try:
        check_closed(ray.processes(), None if on_loopback(port.host) else deployment.ports["grpc_options.port"])
    except PortError:
        if fresh:
            cluster.stop(ray)
        raise
    doors = {"gRPC": [deployment.target]}
    if port.http:
        doors |= {
            "OpenAI's protocol": openai_addresses(deployment),
            "scores": [*deployment.http_addresses(RewardConfig).values()],
        }
    said = "; ".join(f"{door} at {', '.join(places)}" for door, places in doors.items() if places)
    say(f"all running: {', '.join(deployment.applications)}; {said}; logs in {ray.logs}")


def openai_addresses(deployment: ServicesFile) -> list[str]:
    """The addresses at which clients of OpenAI's protocol reach the rollout applications."""
    return [f"{address}/v1" for address in deployment.http_addresses(RolloutConfig).values()]


def _decided(deployment: ServicesFile) -> ServicesFile:
    """The file with what it leaves to the sums of memory decided."""
    # Imported here because it loads torch, as below.
    from orchestrator.commands.checks.startable import decided_here

    return decided_here(deployment) if isinstance(deployment, Deployment) else deployment


class Consequences(NamedTuple):
    """The consequences of a file for a head that runs, a line each; nothing if nothing changes."""

    refused: list[str]
    """Reasons for which the head cannot take the file."""
    told: list[str]
    """The changes, and the runs that notice them."""


def consequences(ray: cluster.Cluster, deployment: ServicesFile) -> Consequences:
    """The consequences of deploying the file on the head that runs."""
    try:
        described = cluster.serve(ray)
    except OSError as error:
        # Whether Serve can be reached at all is seen when it is given the file.
        return Consequences([], [f"what will change is not known, as Ray's dashboard does not answer ({error})"])
    if refused := kept(described, deployment.raw):
        return Consequences(refused, [])
    found = changes(described["applications"], deployment.raw.get("applications") or [])
    lines = [change.text for change in found]
    if any(change.restarts for change in found) and isinstance(deployment, Deployment):
        run = asyncio.run(_training(deployment.orchestrator))
        lines += [f"run {run} is training with these services; {_MEANWHILE}"] if run else []
    return Consequences([], lines)


async def _training(config: OrchestratorConfig) -> str:
    # Imported here because it loads torch, which takes seconds that errors in the file need not wait for.
    from orchestrator.commands.lease import training

    services = Services.connect(config)
    try:
        return await training(services)
    finally:
        await services.close()


def _check_place(deployment: ServicesFile) -> None:
    """Raises ConfigError if a head may not be started here."""
    if os.environ.get("RAY_ADDRESS"):
        # Serve knows whole files alone.
        path = shlex.quote(str(deployment.path))
        rendered = f"quartet render {path} > serve.yaml && serve deploy serve.yaml"
        command = rendered if deployment.facts else f"serve deploy {path}"
        raise ConfigError(
            f"RAY_ADDRESS is set: deploy to that cluster with `{command}`, or unset it to start a local Ray head"
        )
    check_ports(deployment.ports)


def _check_startable(deployment: ServicesFile) -> None:
    """Raises ConfigError if a service would not start on this machine, which it would say only a minute later."""
    # Imported here because it loads torch, which takes seconds that the other errors need not wait for.
    import torch

    from orchestrator.commands.checks.startable import beyond_this_machine, unstartable

    lines = [
        *unstartable(deployment),
        *beyond_this_machine(deployment, os.cpu_count() or 1, torch.cuda.device_count()),
    ]
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


async def _ask_all(deployment: ServicesFile, say: Callable[[str], None], timeout_s: float) -> None:
    """Returns when each service of a run has described itself; without a run, when each application is healthy.
    Names the models and functions whose files have changed since, as services that go on read none again.

    Raises:
        ConfigError: the port has TLS and the credentials have not, or the reverse.
        Unavailable: services do not answer within `timeout_s`.
    """
    # Imported here because it loads torch, as above.
    from orchestrator.commands.checks.outdated import behind_files, behind_files_of_run
    from orchestrator.commands.patience import NOTE_EVERY_S, Patience

    patience = Patience(timeout_s, NOTE_EVERY_S, say, "--timeout-s")
    if not isinstance(deployment, Deployment):
        async with credentials.connect(deployment.target) as channel:
            await patience(partial(_healthy, deployment, channel))
            with contextlib.suppress(ServiceError):
                scorers = {
                    name: await RewardClient(channel, name).scorers(DESCRIBED_S)
                    for name, section in deployment.services.items()
                    if isinstance(section, RewardConfig)
                }
                for line in behind_files(deployment, scorers, {}):
                    say(line)
        return
    config = deployment.orchestrator
    services = Services.connect(config)

    async def ask(seconds: float) -> Infos:
        try:
            return await services.infos(seconds)
        except ExceptionGroup:
            await services.check_tls(config)
            raise

    try:
        infos = await patience(ask)
    finally:
        await services.close()
    for line in behind_files_of_run(deployment, infos.by_service):
        say(line)


async def _healthy(deployment: ServicesFile, channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Returns if each of Quartet's applications in the file is healthy; raises as `_ask_all` otherwise."""
    ask = health_pb2_grpc.HealthStub(channel).Check
    for name in deployment.services:
        try:
            reply = await ask(health_pb2.HealthCheckRequest(service=name), timeout=timeout_s)
        except grpc.RpcError as error:
            await credentials.check_tls(deployment.target)
            raise from_rpc(error, f"{name}.Check") from None
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise Unavailable(f"{name}.Check: its model does not work; the services' logs say why")
