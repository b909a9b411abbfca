"""Settings of a replica's process that Serve has no options for."""

import os
from collections.abc import Mapping
from typing import Any

from quartet.config.base import ConfigError
from quartet.security.port import CALLBACK_VARIABLE, REPLICA_HOST_VARIABLE, UNGUARDED
from quartet.serving.door.failed_calls import shorten_failed_calls


def prepare_replica(environment: Mapping[str, str] | None = None) -> None:
    """Prepares this process to be a replica. Each deployment's constructor calls it first.

    Args:
        environment: variables; None for this process's.

    Raises:
        ConfigError: Ray was started without Quartet's settings, so that Serve's proxies would let every caller reach
            this replica.
    """
    variables = os.environ if environment is None else environment
    if not variables.get(CALLBACK_VARIABLE):
        raise ConfigError(UNGUARDED)
    shorten_failed_calls()
    if host := variables.get(REPLICA_HOST_VARIABLE):
        _listen_on(host)


def _listen_on(host: str) -> None:
    """Makes this replica listen on `host`, and not on every address, for calls between deployments.

    Serve opens that port after the deployment's constructor has returned, by a function that it has imported.
    """
    from ray.serve._private import replica

    open_port = replica.add_port_to_grpc_server
    address = f"[{host}]" if ":" in host else host

    def add_port_to_grpc_server(server: Any, everywhere: str) -> int:
        return int(open_port(server, f"{address}:{everywhere.rpartition(':')[2]}"))

    replica.add_port_to_grpc_server = add_port_to_grpc_server
