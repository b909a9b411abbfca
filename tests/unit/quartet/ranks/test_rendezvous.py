"""Addresses at which members find one another."""

from pathlib import Path

import pytest
import torch

from quartet.ranks.rendezvous import address_towards, node_address
from quartet.weight_transfer.meeting import open_store
from quartet.weight_transfer.receiver import GroupReceiver, Joining

INTERFACES = Path("/proc/net/if_inet6")
LOOPBACK = ["127.0.0.1", *(["::1"] if INTERFACES.exists() and f"{1:032x}" in INTERFACES.read_text() else [])]
"""The loopback addresses of this machine, which may have no IPv6."""


@pytest.mark.parametrize("host", LOOPBACK)
def test_this_machine_is_reached_on_loopback(host: str) -> None:
    assert address_towards(host) == host
    assert address_towards("localhost") in LOOPBACK


def test_an_address_of_this_machine_is_reached_from_itself() -> None:
    own = address_towards(node_address())
    assert own in (node_address(), *LOOPBACK)  # a machine without a network may have a name on 127.0.1.1
    assert address_towards(own) == own


def test_a_name_that_a_replica_does_not_know_is_refused_by_the_name_of_its_key() -> None:
    joining = Joining("gloo", [["nobody.invalid", 7]], 1, 2, 1, 5.0)
    with pytest.raises(RuntimeError, match=r"orchestrator\.weights\.host: .* does not reach nobody\.invalid"):
        GroupReceiver(torch.device("cpu")).join(joining)


def test_an_address_of_another_machine_is_refused_by_the_name_of_its_key() -> None:
    with pytest.raises(RuntimeError, match=r"orchestrator\.weights\.host: .* cannot listen on 192\.0\.2\.7"):
        open_store("192.0.2.7", 1.0)
