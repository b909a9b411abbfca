"""A local Ray head with the four services: started, watched, and stopped by the ids of its processes."""

import json
import os
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from orchestrator.deployment import head_record, privacy, processes
from orchestrator.deployment.head import Ports, last_words, launch
from orchestrator.deployment.head_record import HeadRecord
from orchestrator.deployment.listeners import PortError, check_closed
from orchestrator.deployment.lock import held
from quartet.security import local

STATE = Path(".quartet/ray.json")
TOKEN = "token"
"""File, beside the state, with the secret that all parts of the head require."""
LOG = "ray.log"
LOCK = "lock"
LOCK_S = 60
"""Seconds that a `quartet up` may take to notice that its head was ended."""
LOGS = "logs"
"""Folder, beside the state, with the logs of the head that was stopped last."""
_LOOK_EVERY_S = 0.5

Say = Callable[[str], None]


class ClusterError(RuntimeError):
    """The cluster or an application did not start. The message says which and why."""


class _SlowStart(ClusterError):
    """Ray gave up on its own processes: it allows them 30 s, which no setting changes."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray head that `start` started."""

    pid: int
    created: float
    """Seconds from the machine's start to that of the process, to tell it from a later one with the same pid."""
    address: str
    """host:port of the GCS, for ray.init."""
    dashboard: str
    """URL of the dashboard, for `serve deploy -a`."""
    token: str
    """File with the secret that all parts of the head require."""
    folder: str
    """Folder that its processes write to."""
    secret: str = field(repr=False)
    """Mark that all of them inherit."""

    @property
    def alive(self) -> bool:
        """True if the head still runs."""
        return _environment_of(self.pid, self.created, self.secret) is not None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a process has to set before it imports Ray, in order to join."""
        return privacy.environment(Path(self.token), Path(self.folder))

    @property
    def logs(self) -> Path:
        """Folder with the logs of all processes while the head runs."""
        return Path(self.folder) / "ray" / "session_latest" / "logs"

    def processes(self) -> list[psutil.Process]:
        """The head and all processes that it started, directly or not."""
        return processes.family(self.secret)


def last(state: Path = STATE) -> Cluster | None:
    """The cluster that `quartet up` started last in this folder, unless it was stopped.

    Raises:
        ConfigError: the record of it may be another user's work.
    """
    record = head_record.read(state)
    if record is None:
        return None
    environment = _environment_of(record.pid, record.created, record.secret) or {}
    # This command's RAY_TMPDIR may be another than that of `quartet up`.
    said = Path(environment.get("RAY_TMPDIR", ""))
    return _cluster(record, state, said if said.name == record.name else privacy.find_folder(record.name))


def _cluster(record: HeadRecord, state: Path, folder: Path) -> Cluster:
    return Cluster(
        pid=record.pid,
        created=record.created,
        address=f"127.0.0.1:{record.gcs}",
        dashboard=f"http://127.0.0.1:{record.dashboard}",
        token=str(state.with_name(TOKEN).absolute()),
        folder=str(folder),
        secret=record.secret,
    )


def _environment_of(pid: int, created: float, secret: str) -> dict[str, str] | None:
    """The environment of a head that runs; None if its process has ended or is another one."""
    try:
        process = psutil.Process(pid)
        started = abs(processes.uptime_at_start(process) - created) < processes.UPTIME_PRECISION_S
        # A killed process stays in the table until its parent collects it.
        runs = started and process.status() != psutil.STATUS_ZOMBIE
        return process.environ() if runs and processes.inherited(process, secret) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def running(state: Path = STATE) -> Cluster | None:
    """The cluster that `quartet up` started in this folder, if it still runs. ConfigError as for `last`."""
    cluster = last(state)
    return cluster if cluster and cluster.alive else None


def join(state: Path = STATE) -> None:
    """Sets this process up to join the running cluster, if any and unless RAY_ADDRESS names another. Call it before
    Ray is imported. ConfigError as for `last`."""
    cluster = None if os.environ.get("RAY_ADDRESS") else running(state)
    if cluster:
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(cluster.environment)


def start(
    say: Say,
    state: Path = STATE,
    timeout_s: float = 180,
    clock: Callable[[], float] = time.monotonic,
    promised: Collection[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Cluster:
    """Returns the running cluster, or starts a Ray head on free ports of 127.0.0.1; one `quartet up` at a time.

    Args:
        say: shows a message to the user.
        state: the record of the head.
        timeout_s: longest wait in seconds for another `quartet up`, and again for the head, which Ray may have to
            start several times.
        clock: returns seconds; decides whether a head that Ray gave up on is started again.
        promised: ports that the head leaves to Serve.
        variables: further environment variables of the head, which it passes on to Serve's proxies.

    Raises:
        ClusterError: Ray did not come up in time; the message holds the end of its log.
        PortError: the head listens beyond this machine.
        ConfigError: the folder of the record, or the record, may be another user's work; or the head's files cannot
            be in RAY_TMPDIR.
    """
    if not os.path.lexists(state.parent):
        state.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    head_record.check_place(state.parent)
    # Logs may hold values of environment variables, so only this user may read them.
    state.parent.chmod(0o700)
    busy = "waiting for another `quartet up` or `quartet down` in this folder"
    try:
        with held(state.with_name(LOCK), timeout_s, lambda: say(busy)):
            present = running(state)
            if present:
                say(f"using the Ray head that runs at {present.address}")
            return present or _start(say, state, timeout_s, clock, promised, variables or {})
    except TimeoutError as error:
        raise ClusterError(f"another `quartet up` in this folder does not end: {error}") from None


def _start(
    say: Say,
    state: Path,
    timeout_s: float,
    clock: Callable[[], float],
    promised: Collection[int],
    variables: Mapping[str, str],
) -> Cluster:
    left = last(state)
    if left:
        _end(left, state)
    log, end = state.with_name(LOG), clock() + timeout_s
    while True:
        cluster, head = _launch(say, state, log, promised, variables)
        try:
            _await_dashboard(cluster, head, log, max(1.0, end - clock()))
            check_closed(cluster.processes())
            return cluster
        except (ClusterError, PortError) as error:
            _end(cluster, state)
            if not isinstance(error, _SlowStart) or clock() > end:
                raise
        say("Ray gave its own processes 30 s to start, and this machine is too busy for that: starting it again")


def _launch(
    say: Say, state: Path, log: Path, promised: Collection[int], variables: Mapping[str, str]
) -> "tuple[Cluster, subprocess.Popen[bytes]]":
    secret = secrets.token_hex(32)
    folder = privacy.make_folder(secret)
    token, ports = state.with_name(TOKEN), Ports.free(promised)
    privacy.write_token(token)
    say(f"starting a Ray head at 127.0.0.1:{ports.gcs}")
    # Written before too, as whatever ends this process once the head is there would leave a head that none finds.
    # This process has no mark of the head's, so that nothing takes it for the head.
    record = HeadRecord(
        pid=os.getpid(),
        created=processes.uptime_at_start(psutil.Process()),
        gcs=ports.gcs,
        dashboard=ports.dashboard,
        name=folder.name,
        secret=secret,
    )
    head_record.write(state, record)
    head = launch(ports, {**variables, **privacy.environment(token, folder)}, folder, secret, log)
    started = processes.uptime_at_start(psutil.Process(head.pid))
    record = record.model_copy(update={"pid": head.pid, "created": started})
    head_record.write(state, record)
    return _cluster(record, state, folder), head


def check_environment(cluster: Cluster, wanted: Mapping[str, str]) -> None:
    """Raises ClusterError if the head was started with other values, which its processes keep until it ends."""
    given = psutil.Process(cluster.pid).environ()
    for name, value in wanted.items():
        if given.get(name) != value:
            raise ClusterError(
                f"the Ray head that runs has {name}={given.get(name, '')}, and the file asks for {value}; "
                "stop it with `quartet down` first"
            )


def _await_dashboard(cluster: Cluster, head: "subprocess.Popen[bytes]", log: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if head.poll() is not None:
            said = last_words(log)
            slow = "timed out during startup" in said or "Timed out waiting for node info" in said
            kind = _SlowStart if slow else ClusterError
            raise kind(f"Ray ended with status {head.returncode}:\n{said}")
        try:
            applications(cluster)
            return
        except OSError:
            time.sleep(_LOOK_EVERY_S)
    raise ClusterError(f"Ray was not ready within {timeout_s:.0f} s:\n{last_words(log)}")


def applications(cluster: Cluster) -> dict[str, Any]:
    """Application name -> Serve's description of it. OSError as of `serve`."""
    described: dict[str, Any] = serve(cluster)["applications"]
    return described


def serve(cluster: Cluster) -> dict[str, Any]:
    """Serve's description of itself and of what is deployed. OSError (URLError, TimeoutError) if Serve does not
    answer, or with something else."""
    answer = ask(cluster)
    try:
        described = json.loads(answer)
    except (ValueError, RecursionError):
        described = None
    if not isinstance(described, dict) or not isinstance(described.get("applications"), dict):
        raise OSError(f"{cluster.dashboard} answers {answer[:80]!r}, which is not a description of Serve's")
    return described


def ask(cluster: Cluster, put: str | None = None, timeout_s: float = 10) -> bytes:
    """Serve's description of what is deployed; or, with `put`, its answer to these sections, as JSON, to deploy.

    Raises:
        OSError: Serve does not answer (URLError, TimeoutError), not in HTTP, or refuses (HTTPError, which holds the
            reason).
    """
    secret = Path(cluster.token).read_text(encoding="ascii")
    asked = urllib.request.Request(
        f"{cluster.dashboard}/api/serve/applications/",
        headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        data=None if put is None else put.encode(),
        method="GET" if put is None else "PUT",
    )
    # Not through the proxy that the variable http_proxy may name: it would get the secret.
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with straight.open(asked, timeout=timeout_s) as reply:
            answer: bytes = reply.read()
            return answer
    except HTTPException as error:
        raise OSError(f"{cluster.dashboard} does not answer in HTTP: {error!r}") from None


def stop(cluster: Cluster, state: Path = STATE, patience_s: float = 5) -> None:
    """Ends the head and all processes that it started, and nothing else. Only their logs are kept.

    Raises:
        ClusterError: the head has ended, but a `quartet up` in this folder does not.
        ConfigError: what the record names as the head's folder is not that; it is left alone.
    """
    processes.end(cluster.processes(), patience_s)
    # Taken only now: a `quartet up` that waits for this head holds the lock until it notices the end.
    try:
        with held(state.with_name(LOCK), LOCK_S):
            _end(cluster, state, patience_s)
    except TimeoutError as error:
        raise ClusterError(f"a `quartet up` in this folder does not end: {error}") from None


def _end(cluster: Cluster, state: Path, patience_s: float = 5) -> None:
    processes.end(cluster.processes(), patience_s)
    privacy.remove_folder(Path(cluster.folder), cluster.secret, state.with_name(LOGS))
    record = head_record.read(state)
    if record and record.secret == cluster.secret:
        state.unlink()
        state.with_name(TOKEN).unlink(missing_ok=True)
        local.shut(state.with_name(local.FOLDER.name))
