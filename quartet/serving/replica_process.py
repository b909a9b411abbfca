"""Settings of a replica's process that Serve has no options for."""

import os
from collections.abc import Mapping

from quartet.config.base import ConfigError
from quartet.seams import serve
from quartet.security.port import CALLBACK_VARIABLE, REPLICA_HOST_VARIABLE, UNGUARDED
from quartet.serving.door.log_lines import shorten_failed_calls


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
        serve.listen_on(host)
