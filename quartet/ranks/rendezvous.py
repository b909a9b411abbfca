"""The store through which the members of a process group find one another."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


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
