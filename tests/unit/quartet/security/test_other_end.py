"""A caller and a port of which only one has TLS, or whose authorities differ: the caller is told what to set."""

import asyncio
import datetime
import ipaddress
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from quartet.config.base import ConfigError
from quartet.security.credentials import VARIABLE, check_tls
from quartet.security.keys.folder import Keys
from quartet.security.other_end import has_tls, refused
from quartet.security.port import Port
from quartet.wire.errors import Unavailable
from services.reward.client import RewardClient
from tests.unit.front_door import front_door, made_keys


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.chdir(tmp_path)  # away from the credentials of `quartet up`
    monkeypatch.delenv(VARIABLE, raising=False)
    made = made_keys(tmp_path / "keys", {"me": "trainer"})
    return made


@contextmanager
def calling_with(folder: Path | None) -> Iterator[None]:
    if folder:
        os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


async def test_a_caller_without_tls_is_told_of_a_port_with_it(keys: Keys) -> None:
    async with front_door(Port(policy=keys.policy)) as (target, _):
        assert await has_tls(target) is True
        with pytest.raises(ConfigError, match=f"^{target} has TLS, and this caller has not: set {VARIABLE} to"):
            await check_tls(target)
        with calling_with(keys.folder / "clients/me"):
            await check_tls(target)


async def test_a_caller_with_tls_is_told_of_a_port_without_it(keys: Keys) -> None:
    server = grpc.aio.server()
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    assert await has_tls(target) is False
    await check_tls(target)
    with (
        calling_with(keys.folder / "clients/me"),
        pytest.raises(ConfigError, match=rf"^{target} has no TLS, but .*unset {VARIABLE}, or"),
    ):
        await check_tls(target)
    await server.stop(None)


async def test_a_caller_is_told_of_a_certificate_that_it_does_not_accept(keys: Keys, tmp_path: Path) -> None:
    other = made_keys(tmp_path / "other", {"me": "trainer"})
    async with front_door(Port(policy=keys.policy)) as (target, _):
        with (
            calling_with(other.folder / "clients/me"),
            pytest.raises(ConfigError, match=rf"^{target} has TLS, with a certificate that .*{VARIABLE} has to name"),
        ):
            await check_tls(target)


async def test_a_certificate_is_compared_with_the_host_or_with_the_name_that_is_given(keys: Keys) -> None:
    authorities = (keys.folder / "clients/me/ca.pem").read_bytes()
    async with front_door(Port(policy=keys.policy)) as (target, _):
        assert await refused(target, authorities, None) == ""
        assert "elsewhere.example" in await refused(target, authorities, "elsewhere.example")
        assert await refused(target, None, None)  # the machine trusts other authorities
        assert await refused(target, b"\xff", None) == ""  # which gRPC says itself


async def test_what_grpc_accepts_of_certificates_made_elsewhere_is_not_refused() -> None:
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    root, middle, port = (_name(each) for each in ("root", "middle", "port"))
    authority = x509.BasicConstraints(ca=True, path_length=None)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    chain = [
        _signed(root, root, keys[0], keys[0], [authority]),
        _signed(middle, root, keys[1], keys[0], [authority]),
        _signed(port, middle, keys[2], keys[1], [address]),  # names no key of its signer's
    ]
    private = keys[2].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(private, chain[2] + chain[1])])
    target = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    for trusted in (chain[0], chain[1]):  # the second is not one that signed itself
        async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(trusted)) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
        assert await refused(target, trusted, None) == ""
    await server.stop(None)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _signed(
    holder: x509.Name,
    signer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    extensions: Sequence[x509.ExtensionType],
) -> bytes:
    """A certificate in PEM with these extensions and no others."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(signer, holder, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signing, hashes.SHA256()).public_bytes(Encoding.PEM)


async def test_a_port_that_is_closed_or_silent_or_hangs_up_tells_neither(keys: Keys) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    ending = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    targets = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (silent, ending)]
    for target in (*targets, "127.0.0.1:1"):
        assert await has_tls(target) is None
        await check_tls(target)
        with calling_with(keys.folder / "clients/me"):
            await check_tls(target)
    silent.close()
    ending.close()


async def test_a_client_that_was_never_answered_is_told_of_tls(keys: Keys) -> None:
    async with front_door(Port(policy=keys.policy)) as (target, _), grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(Unavailable, match=f"if only one of the port and this caller has TLS.*{VARIABLE}"):
            await RewardClient(channel).info(2)
