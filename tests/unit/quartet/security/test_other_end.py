"""A caller and a port of which only one has TLS, or whose authorities differ: the caller is told what to set."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

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
