"""Ports of this machine: free ones, those that a file names, and those of a head that other machines can reach."""

import contextlib
import ipaddress
import random
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import psutil

GIVEN = range(20_000, 32_768)
"""Ports to choose from: below those that Linux gives to processes that ask for any (net.ipv4.ip_local_port_range)."""
_ADVICE = (
    "Have it listen on 127.0.0.1: Serve's HTTP port by http_options.host, a function of your own by the address that "
    "it binds, replicas of an application of your own by prepare_replica() of quartet.serving."
    "replica_process in their constructor. Only the gRPC port may be open to other machines, by security.host with a "
    "policy"
)


class PortError(RuntimeError):
    """A port is taken, or other machines reach it. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP port that a process listens on."""

    pid: int
    process: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port} of {self.process} (pid {self.pid})"

    @property
    def on_loopback(self) -> bool:
        """True if only this machine can reach it."""
        address = ipaddress.ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """The ports that these processes listen on; none of those that have ended or may not be looked at."""
    return [listener for process in processes for listener in _of(process)]


def check_closed(processes: Iterable[psutil.Process], opened: int | None = None) -> None:
    """Checks that other machines reach none of these processes. Looks at what is bound, and asks no port.

    Args:
        processes: those that may listen.
        opened: number of the port that the file opens to other machines; None if it opens none.

    Raises:
        PortError: a process listens beyond loopback on another port; names process and port.
    """
    reached = [listener for listener in listeners(processes) if not listener.on_loopback and listener.port != opened]
    if reached:
        lines = [f"{listener} can be reached from other machines" for listener in reached]
        raise PortError("\n".join([*lines, _ADVICE]))


def _of(process: psutil.Process) -> list[Listener]:
    try:
        name = " ".join(process.cmdline())[:60] or process.name()
        connections = process.net_connections("tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [
        Listener(process.pid, name, connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def check_ports(ports: Mapping[str, int]) -> None:
    """Raises PortError if another program listens on one of these ports, given by the keys that set them."""
    for key, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise PortError(f"{key}: {port} cannot be used: {error.strerror}; choose another") from None


def free_ports(count: int, promised: Collection[int] = ()) -> list[int]:
    """`count` different free ports of 127.0.0.1, none of those `promised` to others. A process that asks for any port
    gets none of these: they are still free when they are used. OSError if there are not so many."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(given := sorted(set(GIVEN).difference(promised)), len(given)):
        if len(ports) == count:
            return ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    raise OSError(f"no {count} free ports from {GIVEN.start} to {GIVEN.stop - 1} on 127.0.0.1")
