"""Ports of this machine: free ones, those that a file names, and those of a head that other machines can reach."""

import asyncio
import contextlib
import ipaddress
import random
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import grpc
import psutil
from cryptography import x509

GIVEN = range(20_000, 32_768)
"""Ports to choose from: below those that Linux gives to processes that ask for any (net.ipv4.ip_local_port_range)."""
ANSWER_S = 5.0
"""Seconds that a listener may take to answer."""
_REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_NOT_GRPC = grpc.StatusCode.UNAVAILABLE
_METHODS = ("/ray.serve.ASGIService/HandleRequest", "/grpc.health.v1.Health/Check")
"""Methods that the gRPC ports of replicas and of Serve's proxy have."""


_ADVICE = (
    "Have it listen on 127.0.0.1: Serve's HTTP port by http_options.host, a push by orchestrator.weights.host and "
    "the rollout's host, a function of your own by the address that it binds. Serve's gRPC port may ask its callers "
    "who they are instead: security.policy with tls"
)


class PortError(RuntimeError):
    """A port is taken, or open to unknown callers. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP port that a process listens on."""

    pid: int
    process: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{_joined(self.host, self.port)} of {self.process} (pid {self.pid})"

    @property
    def on_loopback(self) -> bool:
        """True if only this machine can reach it."""
        address = ipaddress.ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    @property
    def reached_at(self) -> str:
        """An address of this machine at which the port can be reached."""
        address = ipaddress.ip_address(self.host)
        if address.is_unspecified:
            return "::1" if address.version == 6 else "127.0.0.1"
        return self.host


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """All ports that these processes listen on."""
    return [listener for process in processes for listener in _of(process)]


def check_closed(processes: Iterable[psutil.Process]) -> None:
    """Raises PortError if one of these processes accepts unknown callers from other machines."""
    _refuse_any(unguarded(listeners(processes)))


class Watch:
    """Checks the ports of a run's processes again and again, each port once."""

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]], again_s: float = 10) -> None:
        """
        Args:
            processes: those that run now.
            again_s: a port that did not refuse is asked once more after this time: its process may be busy.
        """
        self._processes = processes
        self._again_s = again_s
        self._seen: set[Listener] = set()

    async def look(self) -> None:
        """Checks the ports that were opened since the last look.

        Raises:
            PortError: one is open to callers from other machines; names process and port.
        """
        listening = set(await asyncio.to_thread(lambda: listeners(self._processes())))
        suspects = await _unguarded(listening - self._seen)
        if suspects:
            await asyncio.sleep(self._again_s)
            _refuse_any(await _unguarded(suspects))
        # Without those that were closed: another process may open their ports.
        self._seen = listening


def unguarded(candidates: Iterable[Listener]) -> list[Listener]:
    """The listeners beyond loopback that do not refuse a caller without token and certificate."""
    return asyncio.run(_unguarded(candidates))


def _refuse_any(opened: Iterable[Listener]) -> None:
    lines = [f"{listener} answers every caller from other machines" for listener in opened]
    if lines:
        raise PortError("\n".join([*lines, _ADVICE]))


def _of(process: psutil.Process) -> list[Listener]:
    try:
        name = " ".join(process.cmdline())[:60] or process.name()
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [
        Listener(process.pid, name, connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


async def _unguarded(candidates: Iterable[Listener]) -> list[Listener]:
    beyond = [listener for listener in candidates if not listener.on_loopback]
    refused = await asyncio.gather(*(_refuses(listener) for listener in beyond))
    return [listener for listener, refuses in zip(beyond, refused, strict=True) if not refuses]


async def _refuses(listener: Listener) -> bool:
    """True if it speaks gRPC, in plaintext or over TLS, and refuses calls without an identity."""
    target = _joined(listener.reached_at, listener.port)
    plain = await _answers(grpc.aio.insecure_channel(target))
    if plain != {_NOT_GRPC}:
        return bool(plain & _REFUSED) and plain <= _REFUSED | {grpc.StatusCode.UNIMPLEMENTED}
    try:
        certificate = await asyncio.to_thread(_certificate, listener)
    except ConnectionRefusedError:
        return True  # it has ended meanwhile
    except OSError:
        return False  # it accepts connections but speaks neither
    over_tls = await _answers(_trusting(target, certificate))
    # If certificates are required, the connection itself is refused.
    return over_tls == {_NOT_GRPC} or (
        bool(over_tls & _REFUSED) and over_tls <= _REFUSED | {grpc.StatusCode.UNIMPLEMENTED}
    )


async def _answers(channel: grpc.aio.Channel) -> set[grpc.StatusCode]:
    async with channel:
        return set(await asyncio.gather(*(_answer(channel, method) for method in _METHODS)))


async def _answer(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    try:
        await channel.unary_unary(method)(b"", timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        # A certificate that this probe cannot verify does not mean that the server refuses the call.
        return grpc.StatusCode.UNKNOWN if "VERIFY_FAILED" in str(error.debug_error_string()) else error.code()
    return grpc.StatusCode.OK


def _certificate(listener: Listener) -> bytes:
    """The listener's certificate. OSError if it has none."""
    return ssl.get_server_certificate((listener.reached_at, listener.port), timeout=ANSWER_S).encode()


def _trusting(target: str, certificate: bytes) -> grpc.aio.Channel:
    """A channel that accepts this certificate, whatever name it is for, and has no client certificate."""
    extensions = x509.load_pem_x509_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    name = next(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress))
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    return grpc.aio.secure_channel(target, credentials, options=[("grpc.ssl_target_name_override", name)])


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_ports(ports: Mapping[str, int]) -> None:
    """Raises PortError if another program listens on one of these ports, given by the keys that set them."""
    for key, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise PortError(f"{key}: {port} cannot be used: {error.strerror}; choose another") from None


def free_ports(count: int) -> list[int]:
    """`count` different free ports of 127.0.0.1. A process that asks for any port gets none of these: they are
    still free when they are used. OSError if there are not so many."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(GIVEN, len(GIVEN)):
        if len(ports) == count:
            return ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    raise OSError(f"no {count} free ports from {GIVEN.start} to {GIVEN.stop - 1} on 127.0.0.1")
