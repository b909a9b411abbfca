"""Settings of a replica's process that Serve has no options for."""

import os

from quartet.config.base import ConfigError
from quartet.seams import serve
from quartet.security.port import CALLBACK_VARIABLE, REPLICA_HOST_VARIABLE, UNGUARDED
from quartet.serving.door.log_lines import shorten_failed_calls


def prepare_replica() -> None:
    """Prepares this process to be a replica. Each deployment's constructor calls it first.

    Raises:
        ConfigError: Ray was started without Quartet's settings, so that Serve's proxies would let every caller reach
            this replica.
    """
    if not os.environ.get(CALLBACK_VARIABLE):
        raise ConfigError(UNGUARDED)
    shorten_failed_calls()
    if host := os.environ.get(REPLICA_HOST_VARIABLE):
        serve.listen_on(host)
