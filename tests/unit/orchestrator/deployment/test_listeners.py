"""Ports of this process beyond loopback, and which of them refuse a caller that does not say who it is."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

import grpc
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from orchestrator.deployment.listeners import Listener, PortError, Watch, check_closed, listeners, unguarded

EVERYWHERE = "0.0.0.0"
Answer = Callable[[Any, grpc.aio.ServicerContext], Awaitable[bytes]]


class Service(grpc.GenericRpcHandler):
    """Answers every method alike."""

    def __init__(self, answer: Answer) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(answer)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handler


async def accepting(request: Any, context: grpc.aio.ServicerContext) -> bytes:
    return b""


async def refusing(request: Any, context: grpc.aio.ServicerContext) -> bytes:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is it?")
    raise AssertionError


def certificate(name: x509.GeneralName) -> tuple[bytes, bytes]:
    """Key and certificate, signed by itself, of a server with this name."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quartet")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain), signed.public_bytes(encoding)


@asynccontextmanager
async def serving(answer: Answer, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[Listener]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Service(answer),))
    address = f"{EVERYWHERE}:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    yield Listener(1, "a test", EVERYWHERE, port)
    await server.stop(0)


async def is_open(answer: Answer, credentials: grpc.ServerCredentials | None = None) -> bool:
    async with serving(answer, credentials) as listener:
        return await asyncio.to_thread(unguarded, [listener]) == [listener]


@pytest.fixture(params=[x509.DNSName("quartet.example"), x509.IPAddress(ip_address("10.1.2.3"))], ids=["dns", "ip"])
def tls(request: pytest.FixtureRequest) -> tuple[bytes, bytes]:
    return certificate(request.param)


@pytest.mark.parametrize(("answer", "opened"), [(accepting, True), (refusing, False)])
async def test_a_port_in_the_clear_is_closed_if_it_refuses_strangers(answer: Answer, opened: bool) -> None:
    assert await is_open(answer) is opened


@pytest.mark.parametrize(("answer", "opened"), [(accepting, True), (refusing, False)])
async def test_a_port_with_tls_is_not_closed_by_tls_alone(
    tls: tuple[bytes, bytes], answer: Answer, opened: bool
) -> None:
    assert await is_open(answer, grpc.ssl_server_credentials([tls])) is opened


async def test_a_port_that_asks_for_certificates_is_closed(tls: tuple[bytes, bytes]) -> None:
    credentials = grpc.ssl_server_credentials([tls], root_certificates=tls[1], require_client_auth=True)
    assert await is_open(accepting, credentials) is False


@pytest.fixture(params=["0.0.0.0", "::", "127.0.0.1", "::1"])
def silent(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A port that takes connections and says nothing, of whatever protocol."""
    host = request.param
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        threading.Thread(target=_close_all, args=(server,), daemon=True).start()
        yield host, server.getsockname()[1]


def _close_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


async def test_a_port_of_any_other_kind_is_named_unless_it_is_on_loopback(silent: tuple[str, int]) -> None:
    host, port = silent
    me = psutil.Process()
    assert (host, port) in {(actual.host, actual.port) for actual in listeners([me])}
    if host in ("127.0.0.1", "::1"):
        await asyncio.to_thread(check_closed, [me])
        return
    with pytest.raises(PortError) as caught:
        await asyncio.to_thread(check_closed, [me])
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert str(caught.value).startswith(f"{shown} of ")
    assert f"(pid {me.pid}) answers every caller from other machines\nHave it listen on 127.0.0.1" in str(
        caught.value
    )


class Looked(Service):
    """Answers everyone, and counts how often it is asked."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.asked = 0

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> bytes:
            self.asked += 1
            if code is not grpc.StatusCode.OK:
                await context.abort(code, "who is it?")
            return b""

        super().__init__(answer)


@asynccontextmanager
async def opened(service: Service) -> AsyncIterator[int]:
    """Opens a port for the service on every address, in this process."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(f"{EVERYWHERE}:0")
    await server.start()
    yield port
    await server.stop(0)


async def test_a_port_that_opens_during_a_run_is_named_and_one_that_refuses_is_asked_once() -> None:
    me, guarded = psutil.Process(), Looked(grpc.StatusCode.UNAUTHENTICATED)
    watch = Watch(lambda: [me], again_s=0.1)
    async with opened(guarded):
        await watch.look()
        assert guarded.asked == 2  # by each of its methods
        await watch.look()
        assert guarded.asked == 2
        async with opened(Looked(grpc.StatusCode.OK)) as port:
            with pytest.raises(PortError, match=rf":{port} of .* \(pid {me.pid}\) answers every caller"):
                await watch.look()


async def test_a_process_that_is_busy_for_a_moment_is_not_taken_for_an_open_one() -> None:
    class Busy(Service):
        calls = 0

        def __init__(self) -> None:
            super().__init__(self.answer)

        async def answer(self, request: Any, context: grpc.aio.ServicerContext) -> bytes:
            self.calls += 1
            code = grpc.StatusCode.UNAVAILABLE if self.calls <= 2 else grpc.StatusCode.UNAUTHENTICATED
            await context.abort(code, "not now")
            raise AssertionError

    me, busy = psutil.Process(), Busy()
    async with opened(busy):
        await Watch(lambda: [me], again_s=0.1).look()
    assert busy.calls == 4


@pytest.mark.parametrize(
    ("host", "on_loopback"),
    [("127.0.0.1", True), ("::ffff:127.0.0.1", True), ("::1", True), ("::", False), ("::ffff:10.0.0.1", False)],
)
def test_loopback_is_told_apart(host: str, on_loopback: bool) -> None:
    assert Listener(1, "a test", host, 1).on_loopback is on_loopback
