"""The store in which a push's sender and its receivers find one another.

On loopback it is a file without a name, which only processes of the same user can open. torch's TCPStore has no
access control: every user of the machine may connect to one, list its keys, and change or delete them, so that a key
that cannot be guessed protects nothing. Between machines there is only the TCPStore.
"""

import os
import secrets
from datetime import timedelta

from torch.distributed import FileStore, Store

from quartet.ranks.rendezvous import address_towards, reach_store, serve_store
from quartet.security.port import on_loopback
from quartet.weight_transfer.memory.shared_memory import open_unnamed

_opened: dict[int, Store] = {}
"""The stores on loopback that this process has opened, by number, for as long as it lives: a torch group that is
still being freed may use one, and the number of a file that was closed might be another's by then. A file holds a few
KiB, and a run has one for each of its senders."""


def open_store(host: str, timeout_s: float) -> tuple[Store, int]:
    """Opens a store for receivers that reach this process at `host`; returns it and the number by which `find_store`
    finds it: a port, or on loopback the number of a file.

    Raises:
        RuntimeError: this machine cannot listen there.
    """
    if not on_loopback(host):
        try:
            store = serve_store(host, timeout_s)
        except OSError as error:
            raise RuntimeError(
                f"orchestrator.weights.host: the learner's machine cannot listen on {host} ({error.strerror}); give "
                "one of its addresses, or null for the one that Ray has for its node"
            ) from None
        return store, int(store.port)
    number = secrets.randbelow(2**31 - 1) + 1
    file = os.memfd_create(f"quartet-{number}")
    os.fchmod(file, 0o600)
    return _kept(number, file, timeout_s), number


def own_address(host: str) -> str:
    """The address at which the other members of a group reach this one, whose sender is at `host`.

    Raises:
        RuntimeError: this machine does not know or reach `host`.
    """
    try:
        return address_towards(host)
    except OSError as error:
        raise RuntimeError(
            f"orchestrator.weights.host: this machine does not reach {host} ({error.strerror}); give an address at "
            "which all replicas reach the learner, or null for the one that Ray has for its node"
        ) from None


def find_store(host: str, number: int, timeout_s: float) -> Store:
    """The store that `open_store` opened on `host`.

    Raises:
        RuntimeError: it does not answer, or no process of this user on this machine has it.
    """
    if not on_loopback(host):
        return reach_store(host, number, timeout_s)
    if number not in _opened:
        return _kept(number, _descriptor(number), timeout_s)
    _opened[number].set_timeout(timedelta(seconds=timeout_s))
    return _opened[number]


def _kept(number: int, file: int, timeout_s: float) -> Store:
    store = _opened[number] = FileStore(f"/proc/self/fd/{file}", -1)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _descriptor(number: int) -> int:
    try:
        return open_unnamed(f"/memfd:quartet-{number}", os.O_RDWR)
    except FileNotFoundError:
        raise RuntimeError(
            "the learner's store is not on this machine or is another user's; set orchestrator.weights.host to an "
            "address at which this machine reaches the learner's, or to null for the one that Ray has for its node"
        ) from None
