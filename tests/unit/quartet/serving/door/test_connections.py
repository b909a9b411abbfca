"""Connections that prove nothing: they give way, and none of them keeps the owner's out."""

import asyncio
import os
import resource
import socket
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from grpc import StatusCode

from quartet.security.credentials import VARIABLE, connect
from quartet.security.policy import Limits, digest
from quartet.security.port import Port
from quartet.serving.door.connections import LOOK_S, PROOF_S, Connections, _ends, spelled
from tests.unit.door_process import door
from tests.unit.fake_clock import Clock
from tests.unit.front_door import ANSWER_S, ask, front_door, made_keys, outcome
from tests.unit.resting import resting


class Listener:
    """A port of this process that accepts connections and does nothing with them."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily = socket.AF_INET) -> None:
        self.host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._stack = stack
        self._listening = stack.enter_context(closing(socket.socket(family)))
        self._listening.bind((self.host, 0))
        self._listening.listen(100)
        self.port = int(self._listening.getsockname()[1])

    def connect(self) -> socket.socket:
        """The client's end of a new connection."""
        client = self._stack.enter_context(closing(socket.create_connection((self.host, self.port))))
        self._stack.enter_context(closing(self._listening.accept()[0]))
        client.settimeout(0.05)
        return client


def is_open(client: socket.socket) -> bool:
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True


def test_a_descriptor_that_is_no_socket_any_more_costs_none(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open("w") as file:
        assert _ends(file.fileno()) == (0, "")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (("127.0.0.1", 7), "ipv4:127.0.0.1:7"),
        (("::ffff:127.0.0.1", 7, 0, 0), "ipv4:127.0.0.1:7"),
        (("::1", 7, 0, 0), "ipv6:%5B::1%5D:7"),
        (("fe80::1%eth0", 7, 0, 4), "ipv6:%5Bfe80::1%254%5D:7"),
        (("fe80::1", 7, 0, 4), "ipv6:%5Bfe80::1%254%5D:7"),
    ],
)
def test_addresses_are_spelled_as_grpc_does(address: Any, expected: str) -> None:
    """With another spelling a connection that has proved who it is would count as a
    stranger's, and be closed under its calls."""
    assert spelled(*address) == expected


def watched(listener: Listener, clock: Clock, most: int, most_files: int = 1000) -> Connections:
    limits = Limits(strangers=most, handshake_s=30)
    connections = Connections(lambda: limits, most_files, clock)
    connections._port = listener.port
    return connections


def test_a_connection_that_proves_nothing_is_closed_in_time() -> None:
    """A stranger could go on for ever, for instance with frames of a header that does not end."""
    with ExitStack() as stack:
        listener, clock = Listener(stack), Clock()
        connections = watched(listener, clock, most=10)
        idle, used = listener.connect(), listener.connect()
        connections.prove(f"ipv4:127.0.0.1:{used.getsockname()[1]}")
        for age, closed in ((0.0, 0), (29.9, 0), (30.0, 1)):
            clock.now = age
            assert connections.look() == closed
        assert [is_open(client) for client in (idle, used)] == [False, True]


def test_the_oldest_give_way_once_they_have_had_time_to_prove_who_they_are() -> None:
    with ExitStack() as stack:
        listener, other, clock = Listener(stack), Listener(stack), Clock()
        connections = watched(listener, clock, most=2)
        beside = [other.connect() for _ in range(5)]
        first = [listener.connect() for _ in range(3)]
        assert connections.look() == 0
        clock.now += PROOF_S / 2
        later = [listener.connect() for _ in range(3)]
        assert connections.look() == 0
        clock.now += PROOF_S / 2
        assert connections.look() == 3
        assert [is_open(client) for client in (*first, *later, *beside)] == [False] * 3 + [True] * 8


async def test_each_of_two_guarded_ports_leaves_the_others_connections_alone() -> None:
    """The newest callers of one would else be closed as strangers to the other."""
    with ExitStack() as stack:
        listener, other, clock = Listener(stack), Listener(stack), Clock()
        connections = watched(listener, clock, most=100, most_files=16)
        beside = [other.connect() for _ in range(5)]
        Connections(lambda: Limits(strangers=100, handshake_s=30), 1000, clock).watch(other.port)
        assert connections.look() == 0
        assert all(is_open(client) for client in beside)


@pytest.mark.parametrize(
    ("family", "form"), [(socket.AF_INET, "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "ipv6:%5B::1%5D:{}")]
)
def test_a_connection_with_an_admitted_call_stays_however_old_it_is(family: socket.AddressFamily, form: str) -> None:
    with ExitStack() as stack:
        listener, clock = Listener(stack, family), Clock()
        connections = watched(listener, clock, most=1)
        clients = [listener.connect() for _ in range(4)]
        connections.prove(form.format(clients[0].getsockname()[1]))
        connections.look()
        clock.now += PROOF_S
        assert connections.look() == 2
        assert [is_open(client) for client in clients].count(True) == 2
        assert is_open(clients[0])


def test_many_more_than_the_process_has_files_for_give_way_at_the_next_look() -> None:
    with ExitStack() as stack:
        listener, clock = Listener(stack), Clock()
        connections = watched(listener, clock, most=2, most_files=16)
        clients = [listener.connect() for _ in range(12)]
        assert connections.look() == 0
        clock.now += LOOK_S
        assert connections.look() == 4
        assert [is_open(client) for client in clients].count(True) == 8


def test_of_the_connections_to_another_port_of_the_process_the_oldest_stay() -> None:
    """A port of Ray's, whose own connections cannot be told from strangers', but came first."""
    with ExitStack() as stack:
        listener, other = Listener(stack), Listener(stack)
        connections = watched(listener, Clock(), most=2, most_files=32)
        first = [other.connect() for _ in range(3)]
        assert connections.look() == 0
        later = [other.connect() for _ in range(9)]
        assert connections.look() == 8
        assert [is_open(client) for client in first] == [True] * 3
        assert [is_open(client) for client in later].count(True) == 1


def test_what_was_proved_ends_with_its_connection() -> None:
    with ExitStack() as stack:
        listener = Listener(stack)
        connections = watched(listener, Clock(), most=2)
        connections.prove("ipv4:127.0.0.1:1")
        connections.look()
        assert connections._proved == set()


def keys_of(folder: Path, kind: str, **limits: object) -> tuple[Path, Path]:
    """A policy that asks for tokens, with TLS or on plain loopback, and a caller's credentials."""
    if kind == "tls":
        keys = made_keys(folder / "keys", {"run-a": "trainer"}, tokens=True)
        policy, client = keys.policy, keys.folder / "clients/run-a"
    else:
        policy, client = folder / "policy.yaml", folder / "client.yaml"
        policy.write_text(
            yaml.safe_dump({"identities": {"run-a": {"role": "trainer", "tokens": [digest("secret")]}}})
        )
        client.write_text(yaml.safe_dump({"plaintext": True, "token_file": "token"}))
        (folder / "token").write_text("secret\n")
    policy.write_text(yaml.safe_dump(yaml.safe_load(policy.read_text()) | {"limits": limits}))
    return policy, client


@pytest.mark.parametrize("kind", ["plain", "tls"])
async def test_a_callers_connection_outlives_those_of_strangers(tmp_path: Path, kind: str) -> None:
    """The port finds it among its own files by the address that gRPC gives for it."""
    policy, client = keys_of(tmp_path, kind, strangers=10)
    async with front_door(Port(policy=policy)) as (target, _), connect(target, {VARIABLE: str(client)}) as channel:
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        port = int(target.rpartition(":")[2])
        here = psutil.Process().net_connections("tcp")
        [own] = [each.raddr.port for each in here if each.raddr and each.laddr.port == port]
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in strangers]
        async with asyncio.timeout(20):
            while sum(end.done() for end in ends) < 40:
                await asyncio.sleep(0.05)
        here = psutil.Process().net_connections("tcp")
        accepted = {each.raddr.port for each in here if each.laddr.port == port and each.status == "ESTABLISHED"}
        assert own in accepted
        assert len(accepted) == 11
        assert (await outcome(ask(channel, "Reward/Score")))[0] is StatusCode.OK
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def _rest_beside_a_caller(folder: Path, secured: str, kind: str, count: int, files: int) -> None:
    policy, client = keys_of(folder, secured)
    with door(policy, folder / "errors", files) as (target, _):
        taken = []

        async def call() -> None:
            began = time.monotonic()
            result = (StatusCode.UNAVAILABLE, "")
            # A client asks again, as ServiceClient does.
            while result[0] is StatusCode.UNAVAILABLE and time.monotonic() - began < ANSWER_S:
                async with connect(target, {VARIABLE: str(client)}) as channel:
                    result = await outcome(ask(channel, "Reward/Info"))
            assert result == (StatusCode.OK, ""), (folder / "errors").read_text()[-500:]
            taken.append(time.monotonic() - began)

        async with connect(target, {VARIABLE: str(client)}) as old:
            assert (await outcome(ask(old, "Reward/Info")))[0] is StatusCode.OK
            for _ in range(5):
                await call()
            alone = statistics.median(taken)
            taken.clear()
            with ExitStack() as stack:
                await asyncio.to_thread(stack.enter_context, resting(target, count, kind))
                for _ in range(10):
                    await call()
                assert (await outcome(ask(old, "Reward/Info")))[0] is StatusCode.OK
    print(f"{secured} {kind} {count}: median {statistics.median(taken):.3f} s, slowest {max(taken):.3f} s")
    assert statistics.median(taken) < 1 + 10 * alone, taken  # of the second for which gRPC then takes no connection
    assert "File descriptor limit reached" not in (folder / "errors").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("secured", "kind", "count", "files"),
    [
        ("plain", "http2", 9000, 8000),
        ("tls", "tls", 1500, 1200),
        *(
            pytest.param(*given, 20_000, 20_000, marks=pytest.mark.exhaustive)
            for given in (("plain", "silent"), ("plain", "http2"), ("tls", "silent"))
        ),
    ],
)
async def test_connections_that_rest_keep_no_new_one_out(
    tmp_path: Path, secured: str, kind: str, count: int, files: int
) -> None:
    """Connections that rest once took all files of the proxy: none of the owner's was answered until they left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await _rest_beside_a_caller(tmp_path, secured, kind, count, min(hard, files))
