"""The store through which the members of a process group find one another, and the addresses at which they do."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def node_address() -> str:
    """Ray's address of the node that this process is on."""
    import ray

    return str(ray.util.get_node_ip_address())


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host`; nothing is sent.

    Raises:
        OSError: `host` is unknown here, or cannot be reached from here.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Opens a rendezvous store on a free port of `host` only (TCPStore by default listens on all interfaces)."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connects to a store that `serve_store` opened."""
    return TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
