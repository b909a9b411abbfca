"""uvicorn's server on Serve's HTTP port, with the bounds that Serve does not set."""

import socket
from collections.abc import Mapping
from typing import Any

import uvicorn

from quartet.config.base import ConfigError
from quartet.security.port import HTTP_VARIABLE, on_loopback
from quartet.serving.door.connections import Connections

LARGEST_HEADERS = 16 << 10
"""Most bytes of a request's headers."""
UVICORN: Mapping[str, Any] = {
    "http": "h11",  # the only parser of uvicorn's that bounds headers
    "h11_max_incomplete_event_size": LARGEST_HEADERS,
    "ws": "none",
    "server_header": False,
    "proxy_headers": False,
}
"""Options of uvicorn for the port, besides Serve's own."""


class WatchedServer(uvicorn.Server):
    """Serves on loopback alone, and closes connections that prove nothing."""

    def __init__(self, connections: Connections, config: uvicorn.Config) -> None:
        """
        Args:
            connections: those of this port.
            config: Serve's options.

        Raises:
            ConfigError: other machines reach the address.
        """
        if not on_loopback(config.host):
            raise ConfigError(
                f"http_options.host: {config.host}; should be 127.0.0.1 with {HTTP_VARIABLE}=open (security.http), "
                "as tokens cross this port without TLS; for other machines put a proxy that terminates TLS before it"
            )
        super().__init__(config)
        self._connections = connections

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until it is told to stop.

        Args:
            sockets: those that Serve has bound; one at least.
        """
        assert sockets
        self._connections.watch(int(sockets[0].getsockname()[1]))
        await super().serve(sockets)
