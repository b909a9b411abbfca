"""A replica's process: where it listens for other deployments, and its refusal to serve behind an unguarded proxy."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import grpc
import psutil
import pytest
from ray.serve import context
from ray.serve._private import replica

from orchestrator.deployment import privacy
from quartet.config.base import ConfigError
from quartet.security.port import CALLBACK, CALLBACK_VARIABLE, REPLICA_HOST_VARIABLE
from quartet.serving.replica_process import prepare_replica


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a replica's for a while, behind a proxy with a guard."""
    monkeypatch.setenv(CALLBACK_VARIABLE, CALLBACK)
    monkeypatch.delenv(REPLICA_HOST_VARIABLE, raising=False)
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    monkeypatch.setattr(context, "_get_internal_replica_context", MagicMock())
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "filters", list(logger.filters))


@pytest.fixture
async def server() -> AsyncIterator[grpc.aio.Server]:
    made = grpc.aio.server()
    yield made
    await made.stop(None)


async def listening_on(server: grpc.aio.Server) -> set[str]:
    """The addresses on which a replica listens after Serve's own code has opened its port."""
    serves = MagicMock(_server=server, _maybe_start_direct_ingress_servers=AsyncMock())
    await replica.Replica._on_initialized(serves)
    port = serves._internal_grpc_port
    here = [found.laddr for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    return {address.ip.removeprefix("::ffff:") for address in here if address.port == port}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_replica_of_a_local_head_listens_on_loopback_alone(
    server: grpc.aio.Server, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when Ray's function has another name, or Serve opens the port without it."""
    monkeypatch.setenv(REPLICA_HOST_VARIABLE, host)
    for _ in range(2):  # twice changes nothing
        prepare_replica()
    assert await listening_on(server) == {host}


async def test_a_replica_of_a_users_own_cluster_is_reached_from_its_other_nodes(server: grpc.aio.Server) -> None:
    prepare_replica()
    assert await listening_on(server) == {"::"}


def test_a_local_head_tells_its_replicas_so(tmp_path: Path) -> None:
    assert privacy.environment(tmp_path, tmp_path)[REPLICA_HOST_VARIABLE] == "127.0.0.1"


@pytest.mark.parametrize("value", [None, ""])
def test_a_replica_does_not_serve_where_proxies_have_no_guard(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CALLBACK_VARIABLE)
    if value is not None:
        monkeypatch.setenv(CALLBACK_VARIABLE, value)
    with pytest.raises(ConfigError, match=f"without a guard; set {CALLBACK_VARIABLE}={CALLBACK} on every node"):
        prepare_replica()
