"""The rollout service alone, with two replicas and its HTTP port."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from orchestrator.deployment import cluster as ray_cluster
from orchestrator.deployment import serving
from orchestrator.deployment.listeners import free_ports
from quartet.security import local
from quartet.security.credentials import VARIABLE, connect
from quartet.security.port import Port
from quartet.wire.callers import Purpose, declared
from services.rollout.client import RolloutClient
from tests import preloaded
from tests.cluster import START_S, Quartet
from tests.configuration import configuration, write_prompts
from tests.crashes import crashes


@asynccontextmanager
async def running_rollout(folder: Path, policy: Path, say: Callable[[str], None]) -> AsyncIterator[Quartet]:
    """A head with nothing but the rollout service of the tests' quartet."""
    http, grpc_port = free_ports(2)
    raw = configuration(policy, policy, write_prompts(folder), http, grpc_port)
    raw["applications"] = raw["applications"][:1]
    imported = preloaded.make_folder()
    preloaded.preload(raw["applications"][0], imported)
    config, state, access = folder / "rollout.yaml", folder / ray_cluster.STATE, folder / local.FOLDER
    config.write_text(yaml.safe_dump(raw))
    os.environ.update(Port(policy=local.policy_in(access), http=True).environment)
    state.parent.mkdir(parents=True)
    local.let_owner_in(grpc_port, access)
    os.environ[VARIABLE] = str(access)
    cluster = ray_cluster.start(say, state)
    try:
        serving.deploy(cluster, config)
        serving.await_running(cluster, ("rollout",), say, START_S)
        target = f"127.0.0.1:{grpc_port}"
        async with connect(target) as channel:
            client: Any = RolloutClient(channel, metadata=declared("streams", Purpose.TRAINING))
            services: Any = SimpleNamespace(rollout=client)
            yield Quartet(folder, config, raw, cluster, target, imported, policy, policy, channel, services)
    finally:
        ray_cluster.stop(cluster, state)
    assert crashes([folder]) == []
