"""One application of Quartet by itself, on a Ray head of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from orchestrator.deployment import cluster, serving

READY_S = 300
console = Console()


@contextmanager
def served(
    folder: Path,
    application: Mapping[str, Any],
    grpc_options: Mapping[str, Any],
    ports: tuple[int, int],
    variables: Mapping[str, str],
) -> Iterator[None]:
    """Context in which an application answers. A head whose start fails or is broken off is ended too.

    Args:
        folder: for the head's files.
        application: as in a file of `applications`.
        grpc_options: as in such a file; the port is left out of account.
        ports: the HTTP port and the gRPC port, on 127.0.0.1.
        variables: further environment variables of the head and its proxies.
    """
    http, grpc = ports
    file, state = folder / "served.yaml", folder / "ray.json"
    options = {
        "http_options": {"host": "127.0.0.1", "port": http},
        "grpc_options": {**grpc_options, "port": grpc},
        "applications": [dict(application)],
    }
    file.write_text(yaml.safe_dump(options))
    try:
        ray = cluster.start(console.print, state, promised=ports, variables=variables)
        serving.deploy(ray, file)
        serving.await_running(ray, (application["name"],), console.print, READY_S)
        yield
    finally:
        if started := cluster.last(state):
            cluster.stop(started, state)
