"""Opens the port of Serve's gRPC server: on one address, guarded, with limits and, if the policy says so, with
TLS."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from quartet.config.base import ConfigError
from quartet.seams.grpc import RefusesUnknownMethods
from quartet.seams.serve import replace_core, running
from quartet.security.authentication import Directory
from quartet.security.file_limit import raise_file_limit
from quartet.security.gate import Gate
from quartet.security.policy import AccessPolicy, Limits, load_policy
from quartet.security.port import UNGUARDED, Port
from quartet.security.tls import server_credentials
from quartet.security.watched import Watched
from quartet.serving.door.connections import Connections
from quartet.serving.door.guard import Guard
from quartet.serving.door.open_calls import OpenCalls
from quartet.serving.door.routes import Routes

_ROUTES = "quartet_routes"
PINGS = ("grpc.http2.min_ping_interval_without_data_ms", 10_000)
"""Option of the gRPC server. Clients ping every 20 s while they wait for an answer (wire/client.py); by default a
server closes the connection of a client that pings for some minutes."""
_MOST_STREAMS = 1024
"""Most open calls on one connection; further ones wait in the client."""
_SILENCE_S = 20
"""Seconds of silence after which a connection is pinged; it is closed after as many again without an answer."""
_IDLE_S = 300
"""Seconds without a call after which a connection is closed; the caller's next call opens another."""
_OLDEST_S = 3600
"""Age, in seconds, at which a connection is closed once its calls are over, so that a withdrawn certificate stops
working."""
UNCOMPRESSED = ("grpc.compression_enabled_algorithms_bitset", 1)
"""Option of the gRPC server: it takes no compressed messages, of which 64 KiB can fill 64 MiB unseen by any limit."""


def open_port(
    server: Any,
    number: int,
    port: Port,
    *,
    reuse: bool = False,
    calls: OpenCalls | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Opens the port of a new Serve gRPC server to which no servicer has been added yet; returns the port's number.

    Args:
        server: Serve's gRPCGenericServer.
        number: of the port; 0 for any free one.
        port: address and policy.
        reuse: whether another process of this user may listen on it as well, as Serve's proxies may.
        calls: those that are open at the other ports of this process; None without others.
        clock: returns seconds; by it the policy's files are looked at again.

    Raises:
        ConfigError: the policy does not allow the port to be opened.
    """
    policy = port.opened()
    watched = watched_directory(port, clock)
    gate, routes = Gate(watched), Routes(running(server))
    files = raise_file_limit()
    connections = Connections(lambda: gate.limits, files)
    guard = Guard(gate, routes, connections.prove, calls or OpenCalls(lambda: gate.limits))
    options = tuple(_options(gate.limits, policy, files, reuse))
    loop, most = asyncio.get_running_loop(), gate.limits.concurrent_calls
    replace_core(server, RefusesUnknownMethods(loop, None, (), (guard,), options, most))  # as gRPC makes its own
    setattr(server, _ROUTES, routes)
    address = f"[{port.host}]:{number}" if ":" in port.host else f"{port.host}:{number}"
    if policy is None or policy.tls is None or watched is None:
        opened = int(server.add_insecure_port(address))
    else:
        directory = watched
        opened = int(server.add_secure_port(address, server_credentials(lambda: directory().policy, clock)))
    connections.watch(opened)
    return opened


def watched_directory(port: Port, clock: Callable[[], float] = time.monotonic) -> Watched[Directory] | None:
    """The identities of the port's policy, read again when its file changes; None without a policy."""
    if port.policy is None:
        return None
    file = port.policy
    return Watched(lambda: Directory(load_policy(file)), lambda: [file], clock)


def _options(limits: Limits, policy: AccessPolicy | None, files: int, reuse: bool) -> list[tuple[str, int]]:
    options = [
        ("grpc.max_receive_message_length", limits.largest),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _MOST_STREAMS),
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_s * 1000)),
        ("grpc.keepalive_time_ms", _SILENCE_S * 1000),
        ("grpc.keepalive_timeout_ms", _SILENCE_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
        # The process needs some for itself: at its limit of files gRPC takes no connection for a second at a time.
        ("grpc.max_allowed_incoming_connections", files * 3 // 4),
        PINGS,
        UNCOMPRESSED,
        ("grpc.so_reuseport", int(reuse)),
    ]
    if policy is not None:
        options.append(("grpc.max_connection_age_ms", _OLDEST_S * 1000))
    return options


def routes_of(server: Any) -> Routes:
    """The routes of a server whose port `open_port` opened. ConfigError for a server without a guard."""
    routes: Routes | None = getattr(server, _ROUTES, None)
    if routes is None:
        raise ConfigError(UNGUARDED)
    return routes
