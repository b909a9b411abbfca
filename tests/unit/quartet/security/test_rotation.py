"""Keys, tokens, authorities and policies that are replaced while the port is open."""

import asyncio
import shutil
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc import StatusCode
from typer.testing import CliRunner

from orchestrator.cli import app
from quartet.config.base import ConfigError
from quartet.security import authentication, watched
from quartet.security.authentication import Directory
from quartet.security.credentials import VARIABLE, connect, life
from quartet.security.identity import Caller
from quartet.security.keys import certificates, folder
from quartet.security.keys.certificates import Authority
from quartet.security.keys.folder import Keys
from quartet.security.policy import digest, load_policy
from quartet.security.port import Port
from quartet.security.renewed import RenewedChannel
from quartet.security.tls import SETTLE_S, Replacements, check_pair
from quartet.security.watched import LOOK_EVERY_S
from quartet.wire.errors import Unauthenticated
from tests.unit.fake_clock import Clock
from tests.unit.front_door import ask, channel_of, edit_identity, front_door, made_keys, outcome


async def test_tokens_are_rotated_and_withdrawn_without_a_restart(tmp_path: Path) -> None:
    keys, clock = made_keys(tmp_path / "keys", {"run-a": "trainer"}, tokens=True), Clock()
    file = keys.folder / "clients/run-a/token"
    async with (
        front_door(Port(policy=keys.policy), clock=clock) as (target, _),
        channel_of(keys, "run-a", target) as channel,
    ):

        async def status() -> StatusCode:
            clock.now += LOOK_EVERY_S
            return (await outcome(ask(channel, "Reward/Score")))[0]

        first = file.read_text()
        keys.make([], {"run-a": "trainer"}, tokens=True)
        second = file.read_text()
        assert first != second
        assert await status() is StatusCode.OK  # the channel is the same and sends the new token
        file.write_text(first)
        assert await status() is StatusCode.OK  # the one before is valid until the next is made
        keys.make([], {"run-a": "trainer"}, tokens=True)
        file.write_text(first)
        assert await status() is StatusCode.UNAUTHENTICATED
        edit_identity(keys.policy, "run-a", tokens=[digest(first)])
        assert await status() is StatusCode.OK
        keys.policy.write_text("identities: {}")  # a slip: the last good policy stays
        assert await status() is StatusCode.OK


async def test_a_run_takes_up_the_files_that_replace_its_certificate(tmp_path: Path) -> None:
    """Files that are broken, or gone, change nothing."""
    keys, clock = made_keys(tmp_path / "keys", {"run-a": "trainer"}), Clock()
    folder = keys.folder / "clients/run-a"
    async with (
        front_door(Port(policy=keys.policy), clock=clock) as (target, replicas),
        channel_of(keys, "run-a", target) as channel,
    ):
        assert isinstance(channel, RenewedChannel)

        async def connection() -> grpc.aio.Channel:
            await asyncio.sleep(1.1 * LOOK_EVERY_S)
            clock.now += LOOK_EVERY_S
            assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
            return channel.now()

        first = await connection()
        (folder / "client.pem").write_text("torn")
        assert await connection() is first
        keys.make(["127.0.0.1"], {"run-a": "trainer"}, tokens=False)
        second = await connection()
        assert second is not first
        shutil.rmtree(folder)
        assert await connection() is second
    assert {caller for _, caller, _ in replicas.seen} == {Caller("run-a", "trainer")}
    assert len(replicas.seen) == 4


class NamedChannel:
    """A channel whose methods answer with its name."""

    def __init__(self, name: str) -> None:
        self.name, self.made, self.closed = name, 0, False

    def unary_unary(self, path: str) -> Callable[[], str]:
        self.made += 1
        return lambda: f"{path} on {self.name}"

    async def close(self, grace: float | None = None) -> None:
        self.closed = True


async def test_a_method_that_a_client_has_kept_is_called_on_the_channel_of_the_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of a run make theirs once, at its beginning."""
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0)
    file, opened = tmp_path / "file", list[Any]()
    file.write_text("first")

    def connect() -> grpc.aio.Channel:
        opened.append(NamedChannel(file.read_text()))
        return opened[-1]  # type: ignore[no-any-return]

    channel = RenewedChannel(connect, [file])
    method = channel.unary_unary("Score")
    assert [method(), method()] == ["Score on first"] * 2
    file.write_text("the second")
    assert [method(), method()] == ["Score on the second"] * 2
    assert [each.made for each in opened] == [1, 1]
    assert not opened[0].closed  # calls may be under way on it
    await channel.close()
    assert [each.closed for each in opened] == [True, True]


def test_a_key_is_that_of_its_certificate(tmp_path: Path) -> None:
    """Each of the two may be replaced before the other, and gRPC would then have neither."""
    made = made_keys(tmp_path / "keys", {"a": "trainer", "b": "trainer"})
    files = {name: made.folder / "clients" / name for name in "ab"}
    certificate = (files["a"] / "client.pem").read_bytes()
    check_pair(certificate, (files["a"] / "client.key").read_bytes(), "here")
    with pytest.raises(ConfigError, match=r"^here: the key is not that of the certificate$"):
        check_pair(certificate, (files["b"] / "client.key").read_bytes(), "here")
    shutil.copy(files["b"] / "client.key", files["a"] / "client.key")
    with pytest.raises(ConfigError, match="the key is not that of the certificate"):
        connect("127.0.0.1:1", {VARIABLE: str(files["a"])})


async def test_closing_a_channel_ends_the_calls_on_those_before_it(tmp_path: Path) -> None:
    file, opened = tmp_path / "file", list[grpc.aio.Channel]()
    file.write_text("first")
    server = grpc.aio.server()

    async def wait(request: bytes, context: grpc.aio.ServicerContext) -> bytes:  # type: ignore[type-arg]
        await asyncio.Event().wait()
        return b""

    handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def connect() -> grpc.aio.Channel:
        opened.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return opened[-1]

    channel = RenewedChannel(connect, [file])
    call = asyncio.ensure_future(channel.unary_unary("/a.B/Wait")(b"", timeout=60))
    await asyncio.sleep(1.1 * LOOK_EVERY_S)
    file.write_text("the second")
    assert channel.now() is opened[1]
    await asyncio.sleep(0.1)
    assert not call.done()
    await channel.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 5)
    assert [each.get_state() for each in opened] == [grpc.ChannelConnectivity.SHUTDOWN] * 2
    await server.stop(None)


def test_a_key_with_a_password_is_an_error_of_the_credentials(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"})
    folder = keys.folder / "clients/run-a"
    key = load_pem_private_key((folder / "client.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "client.key").write_bytes(locked)
    with pytest.raises(ConfigError, match=r"credentials\.yaml\.certificate, key: Password was not given"):
        connect("127.0.0.1:1", {VARIABLE: str(folder)})


def test_the_life_of_a_callers_certificate_is_read_from_its_file(tmp_path: Path) -> None:
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"}, days=10)
    folder, now = keys.folder / "clients/run-a", datetime.now(UTC) + timedelta(days=9)
    seen = life("127.0.0.1:1", now, {VARIABLE: str(folder)})
    assert seen is not None
    assert seen.certificate == folder / "client.pem"
    assert seen.left_s == pytest.approx(86400, abs=600)
    assert seen.whole_s == pytest.approx(864_000, abs=600)
    assert life("127.0.0.1:1", now, {}) is None
    (folder / "credentials.yaml").write_text("ca: [")  # while it is edited
    assert life("127.0.0.1:1", now, {VARIABLE: str(folder)}) is None
    shutil.rmtree(folder)  # by a cleaner; the run goes on with the channel that it has
    assert life("127.0.0.1:1", now, {VARIABLE: str(folder)}) is None


async def test_certificates_are_rotated_without_a_restart(tmp_path: Path) -> None:
    keys, clock = made_keys(tmp_path / "keys"), Clock()
    async with front_door(Port(policy=keys.policy), clock=clock) as (target, _):
        before = await _certificate(keys, target)
        keys.make(["127.0.0.1"], {"late": "prober"}, tokens=False)
        clock.now += LOOK_EVERY_S
        assert await _certificate(keys, target) != before
        for name in ("late", "pager"):  # one that has come since, and one that has been there
            async with channel_of(keys, name, target) as channel:
                assert (await outcome(ask(channel, "Reward/Info")))[0] is StatusCode.OK


async def _certificate(keys: Keys, target: str) -> bytes:
    """The server's, as a new connection is shown it."""
    client, (host, port) = keys.folder / "clients/run-a", target.split(":")
    context = ssl.create_default_context(cafile=keys.folder / "ca/ca.pem")
    context.load_cert_chain(client / "client.pem", client / "client.key")
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def test_another_authority_is_accepted_as_soon_as_the_policy_has_it(tmp_path: Path) -> None:
    keys, other, clock = made_keys(tmp_path / "keys"), made_keys(tmp_path / "other"), Clock()
    (other.folder / "clients/run-a/ca.pem").write_bytes((keys.folder / "ca/ca.pem").read_bytes())
    async with front_door(Port(policy=keys.policy), clock=clock) as (target, _):
        async with channel_of(other, "run-a", target) as channel:
            assert (await outcome(ask(channel, "Reward/Info")))[0] is StatusCode.UNAVAILABLE
        authorities = [(made.folder / "ca/ca.pem").read_bytes() for made in (keys, other)]
        (keys.folder / "ca/ca.pem").write_bytes(b"".join(authorities))
        clock.now += LOOK_EVERY_S
        for made in (keys, other):
            async with channel_of(made, "run-a", target) as channel:
                assert (await outcome(ask(channel, "Reward/Info")))[0] is StatusCode.OK


def test_grpc_is_handed_certificates_only_when_they_were_replaced_and_after_a_pause() -> None:
    """Each time it is handed some, it frees those before, which new connections may be taking at that moment."""
    first, second = (grpc.ssl_server_certificate_configuration([(b"key", name)]) for name in (b"a", b"b"))
    current, pauses = [first], list[float]()
    replacements = Replacements(lambda: current[-1], pauses.append)
    assert replacements.first is first
    assert [replacements() for _ in range(3)] == [None] * 3
    assert pauses == []
    current.append(second)
    assert [replacements() for _ in range(3)] == [second, None, None]
    assert pauses == [SETTLE_S]


@pytest.mark.parametrize("withdraw", [True, False])
def test_a_certificate_that_was_replaced_is_refused_at_once_or_in_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, withdraw: bool
) -> None:
    keys = Keys(tmp_path / "keys", days=1)
    now = datetime.now(UTC)

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]  # of the class itself
            return now

    for module in (authentication, folder):
        monkeypatch.setattr(module, "datetime", Stopped)
    monkeypatch.setattr(certificates, "datetime", SimpleNamespace(datetime=Stopped, UTC=UTC, timedelta=timedelta))

    def make(after: timedelta, **how: bool) -> bytes:
        nonlocal now
        now += after
        keys.make(["127.0.0.1"], {"run-a": "trainer"}, tokens=False, **how)
        return (keys.folder / "clients/run-a/client.pem").read_bytes()

    def accepted(after: timedelta, *shown: bytes) -> list[bool]:
        nonlocal now
        now += after
        directory, results = Directory(load_policy(keys.policy)), []
        for certificate in shown:
            try:
                results.append(directory.caller({"x509_pem_cert": [certificate]}, ()).name)
            except Unauthenticated as error:
                results.append(str(error).partition(";")[0])
        return [result == "run-a" for result in results if result in ("run-a", replaced)]

    replaced = "the certificate of run-a was replaced"
    hour, minute = timedelta(hours=1), timedelta(minutes=1)
    first = make(0 * hour)
    second = make(hour, withdraw=withdraw)
    assert accepted(0 * hour, first, second) == [not withdraw, True]
    assert accepted(9 * minute, first, second) == [not withdraw, True]
    assert accepted(2 * minute, first, second) == [False, True]
    # What was refused once stays so, also while the next one is changed over to.
    third = make(minute)
    assert accepted(minute, first, second, third) == [False, True, True]
    assert accepted(hour, first, second, third) == [False, False, True]


async def test_a_withdrawn_token_is_refused_at_the_next_call(tmp_path: Path) -> None:
    keys, clock = made_keys(tmp_path / "keys", {"run-a": "trainer", "run-b": "trainer"}, tokens=True), Clock()
    file = keys.folder / "clients/run-a/token"
    leaked = file.read_text()
    async with (
        front_door(Port(policy=keys.policy), clock=clock) as (target, _),
        channel_of(keys, "run-a", target) as channel,
        channel_of(keys, "run-b", target) as other,
    ):
        arguments = ["keys", str(keys.folder), "--tokens", "--withdraw", "--client", "run-a=trainer"]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        clock.now += LOOK_EVERY_S
        for caller in (channel, other):
            assert (await outcome(ask(caller, "Reward/Score")))[0] is StatusCode.OK
        file.write_text(leaked)
        code, reason = await outcome(ask(channel, "Reward/Score"))
        assert code is StatusCode.UNAUTHENTICATED
        assert reason.startswith("the policy does not name the bearer token that came with the call, or no longer; ")


def test_a_certificate_that_expires_during_a_session_is_refused(tmp_path: Path) -> None:
    """A client may resume its TLS session for days, and TLS does not look at the date again."""
    keys = made_keys(tmp_path / "keys", {"run-a": "trainer"})
    client, directory = keys.folder / "clients/run-a", Directory(load_policy(keys.policy))

    def shown() -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [(client / "client.pem").read_bytes()]}

    assert directory.caller(shown(), ()).name == "run-a"
    Authority.open(keys.folder / "ca").certify_client(client, "client", "run-a", 0)
    with pytest.raises(Unauthenticated, match="the certificate of run-a has expired; `quartet keys` makes a new one"):
        directory.caller(shown(), ())
