"""Ports of this process that other machines can reach, told from what is bound."""

import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from orchestrator.deployment.listeners import GIVEN, Listener, PortError, check_closed, free_ports, listeners

LOOPBACK = ("127.0.0.1", "::1")


@pytest.fixture(params=["0.0.0.0", "::", *LOOPBACK])
def frozen(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A port whose process takes no connection, as one that stands still: the kernel takes them."""
    host = request.param
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        yield host, server.getsockname()[1]


def test_a_port_counts_by_where_it_is_bound_and_not_by_its_answer(frozen: tuple[str, int]) -> None:
    host, port = frozen
    me = psutil.Process()
    assert (host, port) in {(actual.host, actual.port) for actual in listeners([me])}
    if host in LOOPBACK:
        check_closed([me])
        return
    with pytest.raises(PortError) as caught:
        check_closed([me])
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{shown} of ")
    assert first.endswith(f"(pid {me.pid}) can be reached from other machines")
    assert second.startswith("Have it listen on 127.0.0.1: ")


def test_only_the_port_that_the_file_opens_may_be_open() -> None:
    me = psutil.Process()
    with socket.create_server(("0.0.0.0", 0)) as guarded, socket.create_server(("0.0.0.0", 0)) as other:
        opened, another = (server.getsockname()[1] for server in (guarded, other))
        with pytest.raises(PortError) as caught:
            check_closed([me], opened)
    assert f":{another} of " in str(caught.value)
    assert f":{opened} of " not in str(caught.value)


@pytest.mark.parametrize("error", [psutil.AccessDenied(1), psutil.NoSuchProcess(1)])
@pytest.mark.parametrize("asked", ["cmdline", "net_connections"])
def test_a_process_that_has_ended_or_may_not_be_looked_at_is_left_out(error: psutil.Error, asked: str) -> None:
    class Hidden(psutil.Process):
        pass

    def refuse(*_: Any) -> Any:
        raise error

    setattr(Hidden, asked, refuse)
    with socket.create_server(("0.0.0.0", 0)):
        assert listeners([Hidden()]) == []
        check_closed([Hidden()])


@pytest.mark.parametrize(
    ("host", "on_loopback"),
    [("127.0.0.1", True), ("::ffff:127.0.0.1", True), ("::1", True), ("::", False), ("::ffff:10.0.0.1", False)],
)
def test_loopback_is_told_apart(host: str, on_loopback: bool) -> None:
    assert Listener(1, "a test", host, 1).on_loopback is on_loopback


def test_a_port_promised_to_another_is_given_to_nobody() -> None:
    left = free_ports(3)
    assert set(free_ports(2, set(GIVEN).difference(left))) < set(left)
    with pytest.raises(OSError, match="no 4 free ports"):
        free_ports(4, set(GIVEN).difference(left))
