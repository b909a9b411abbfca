"""Deploys applications on a local Ray head, and waits until they run."""

import os
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.deployment import privacy
from orchestrator.deployment.applications import failure_of, status_of
from orchestrator.deployment.cluster import Cluster, ClusterError, Say, applications

_DEPLOY_S = 300
_LOOK_EVERY_S = 0.5


def deploy(cluster: Cluster, config: Path) -> None:
    """Runs `serve deploy` on the file. ClusterError with Serve's message if it refuses, or if it does not end."""
    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", "-a", cluster.dashboard, str(config)]
    environment = privacy.without_token(dict(os.environ)) | cluster.environment
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_DEPLOY_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"serve deploy did not end within {_DEPLOY_S} s") from None
    if done.returncode:
        raise ClusterError(f"serve deploy failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def await_running(cluster: Cluster, names: tuple[str, ...], say: Say, timeout_s: float) -> None:
    """Returns when every application runs; tells the user what it waits for.

    Raises:
        ClusterError: an application failed (with Serve's message), or time ran out (with the missing ones).
    """
    end = time.monotonic() + timeout_s
    said = ""
    while waiting := _awaited(cluster, names):
        if waiting != said:
            say(f"waiting for {waiting}")
            said = waiting
        if time.monotonic() > end:
            raise ClusterError(f"not running after {timeout_s:g} s: {waiting}")
        time.sleep(_LOOK_EVERY_S)


def _awaited(cluster: Cluster, names: tuple[str, ...]) -> str:
    """Names what does not run yet; empty if everything does. ClusterError if an application failed or Ray ended."""
    try:
        described = applications(cluster)
    except OSError as error:
        # A busy machine answers late; a head that has ended never does.
        if not cluster.alive:
            raise ClusterError(f"the Ray head at {cluster.address} has ended") from None
        return f"Ray's dashboard ({error})"
    states = {name: status_of(described.get(name)) for name in names}
    for name, state in states.items():
        if state.startswith(("DEPLOY_FAILED", "UNHEALTHY")):
            raise ClusterError(f"{name}: {failure_of(described[name])}")
    return ", ".join(f"{name} ({state})" for name, state in states.items() if state != "RUNNING")
