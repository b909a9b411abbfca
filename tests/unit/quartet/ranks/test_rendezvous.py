"""Addresses at which members find one another."""

import socket

import pytest

from quartet.ranks.rendezvous import address_towards, node_address
from quartet.weight_transfer.meeting import open_store


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_is_reached_on_loopback(host: str) -> None:
    assert address_towards(host) in ("127.0.0.1", "::1")


def test_an_address_of_this_machine_is_reached_from_itself() -> None:
    assert address_towards(node_address()) == node_address()


def test_a_name_that_nobody_has_is_no_address() -> None:
    with pytest.raises(socket.gaierror):
        address_towards("nobody.invalid")


def test_an_address_of_another_machine_is_refused_by_the_name_of_its_key() -> None:
    with pytest.raises(RuntimeError, match=r"orchestrator\.weights\.host: .* cannot listen on 192\.0\.2\.7"):
        open_store("192.0.2.7", 1.0)
