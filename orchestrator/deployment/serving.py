"""Deploys applications on a local Ray head, and waits until they run."""

import json
import time
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.deployment import processes
from orchestrator.deployment.applications import failure_of, hindrance, status_of
from orchestrator.deployment.cluster import Cluster, ClusterError, Say, applications, ask
from orchestrator.deployment.file import SERVE_KEYS
from orchestrator.deployment.redeployment import scalable
from quartet.config.base import read_yaml

_LOOK_EVERY_S = 0.5
_STARTED_AGAIN = ("it was killed by `ray.kill`", "HTTP proxies not available after")
"""Ray's and Serve's words for a proxy that did not answer in time: the controller ends it and starts another."""
SAY_EVERY_S = 10.0
"""Longest time, in seconds, for which a user who waits is told nothing."""


def deploy(
    cluster: Cluster,
    config: Path,
    contents: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
    timeout_s: float = 300,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Deploys the applications of the file in place of those that run, each in its `scalable` form.

    Does not wait until they run. Where Serve ends and replaces its own proxy, as it does on a busy machine, it is
    given the file again.

    Args:
        cluster: the head.
        config: the file.
        contents: the file's contents where something was decided in them; None to read them.
        say: shows a message to the user.
        timeout_s: longest wait in seconds.
        clock: returns seconds.

    Raises:
        ClusterError: Serve refused, with its message, or did not take the file in time.
    """
    raw = read_yaml(config) if contents is None else contents
    sections = {key: value for key, value in raw.items() if key in SERVE_KEYS}
    sections["applications"] = [scalable(section) for section in raw.get("applications") or []]
    text, end = json.dumps(sections), clock() + timeout_s
    late, said = f"Serve did not take {config} within {timeout_s:g} s", False
    while True:
        try:
            ask(cluster, text, timeout_s=max(_LOOK_EVERY_S, end - clock()))
            return
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[-2000:]
            if not any(words in reason for words in _STARTED_AGAIN):
                raise ClusterError(f"Serve refused {config}:\n{reason}") from None
            if clock() + _LOOK_EVERY_S > end:
                raise ClusterError(f"{late}:\n{reason}") from None
            if not said:
                say("Serve's proxy did not start in the time that Serve gives it, and is started again")
            said = True
        except OSError as error:
            raise ClusterError(f"{late}: {error}") from None
        time.sleep(_LOOK_EVERY_S)


def await_running(
    cluster: Cluster,
    names: tuple[str, ...],
    say: Say,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when every application runs; tells the user what it waits for, at each change and every SAY_EVERY_S.

    Args:
        cluster: the head.
        names: the applications.
        say: shows a message to the user.
        timeout_s: longest wait in seconds.
        clock: returns seconds.

    Raises:
        ClusterError: an application failed (with the error in Serve's message), or time ran out (with the missing
            ones).
    """
    began = clock()
    said, said_at = "", began
    while waiting := _awaited(cluster, names):
        now = clock()
        if waiting != said or now - said_at >= SAY_EVERY_S:
            again = f", {now - began:.0f} s so far{_halted(cluster, names)}" if waiting == said else ""
            say(f"waiting for {waiting}{again}")
            said, said_at = waiting, now
        if now - began > timeout_s:
            halted = _halted(cluster, names)
            raise ClusterError(f"not running after {timeout_s:g} s: {waiting}{halted}; {_logs(cluster)}")
        time.sleep(_LOOK_EVERY_S)


def _halted(cluster: Cluster, names: tuple[str, ...]) -> str:
    """A clause on replicas that a signal has stopped, for which Serve waits without end while they start; empty if
    there are none."""
    stopped = processes.stopped(cluster.processes())
    told = [
        f"; a signal has stopped process {pid} of {name}, which Serve replaces after `kill -9 {pid}`"
        for pid, title in stopped.items()
        for name in names
        if title.startswith(f"ray::ServeReplica:{name}:")
    ]
    return "".join(told)


def _logs(cluster: Cluster) -> str:
    return f"the services' logs are in {cluster.logs / 'serve'}"


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
            raise ClusterError(f"{name}: {failure_of(described[name])}\n({_logs(cluster)})")
    waiting = {name: state for name, state in states.items() if state != "RUNNING"}
    said = {name: hindrance(described.get(name)) for name in waiting}
    return ", ".join(f"{name} ({state}{said[name] and f': {said[name]}'})" for name, state in waiting.items())
