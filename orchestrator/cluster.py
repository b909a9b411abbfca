"""A local Ray head with the four services on it: started, watched and stopped by the processes' own ids."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

STATE = Path(".quartet/ray.json")
LOG = Path(".quartet/ray.log")
_LOOK_EVERY_S = 0.5

Say = Callable[[str], None]


class ClusterError(RuntimeError):
    """The cluster did not come up, or an application on it did not. The message says which and why."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray head that `start` started."""

    pid: int
    created: float
    """The process's start time: a pid alone may be somebody else's by now."""
    address: str
    """host:port of the GCS, for ray.init."""
    dashboard: str
    """URL, for `serve deploy -a`."""

    @property
    def alive(self) -> bool:
        """The head still runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.created) < 1
        except psutil.NoSuchProcess:
            return False


def running(state: Path = STATE) -> Cluster | None:
    """The cluster that this folder's `quartet up` started, if it still runs."""
    try:
        cluster = Cluster(**json.loads(state.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return cluster if cluster.alive else None


def start(say: Say, state: Path = STATE, timeout_s: float = 180) -> Cluster:
    """The running cluster, or a new Ray head on free ports of 127.0.0.1.

    Raises:
        ClusterError: Ray did not come up in time; the message holds the end of its log.
    """
    found = running(state)
    if found:
        say(f"using the Ray head that runs at {found.address}")
        return found
    state.parent.mkdir(parents=True, exist_ok=True)
    gcs, dashboard, client = _free_ports(3)
    log = state.with_name(LOG.name)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", str(gcs)),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)),
        *("--ray-client-server-port", str(client)),
        # Ray's own range of worker ports holds Serve's.
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--object-store-memory", str(512 << 20), "--disable-usage-stats"),
    ]
    say(f"starting a Ray head at 127.0.0.1:{gcs}")
    with log.open("wb") as output:
        head = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
    cluster = Cluster(
        pid=head.pid,
        created=psutil.Process(head.pid).create_time(),
        address=f"127.0.0.1:{gcs}",
        dashboard=f"http://127.0.0.1:{dashboard}",
    )
    state.write_text(json.dumps(asdict(cluster)))
    _await_dashboard(cluster, head, log, timeout_s)
    return cluster


def check_ports(ports: Mapping[str, int]) -> None:
    """Raises ClusterError if another program listens on one of these ports, given by the keys that set them."""
    for key, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise ClusterError(f"{key}: {port} cannot be used: {error.strerror}; choose another") from None


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _environment() -> dict[str, str]:
    """What every process of the cluster inherits."""
    search = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {
        # Makes the gRPC proxy listen on QUARTET_GRPC_HOST, 127.0.0.1 when unset.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "services.common.proxy:bind_to_host",
        # A proxy that dies takes all traffic with it until Serve has missed three of these; its own choice is 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Threads that spin at barriers make processes on the same cores several times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # So that a reward function or judge in the current folder can be imported by its path.
    return defaults | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(search)}


def _await_dashboard(cluster: Cluster, head: "subprocess.Popen[bytes]", log: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if head.poll() is not None:
            raise ClusterError(f"Ray ended with status {head.returncode}:\n{_tail(log)}")
        try:
            applications(cluster)
            return
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                stop(cluster)
                raise ClusterError(f"Ray answers {error.code}: RAY_AUTH_TOKEN is not the token it asks for") from None
            time.sleep(_LOOK_EVERY_S)
        except (urllib.error.URLError, OSError):
            time.sleep(_LOOK_EVERY_S)
    stop(cluster)
    raise ClusterError(f"Ray was not ready within {timeout_s:g} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def applications(cluster: Cluster) -> dict[str, Any]:
    """What Serve says of its applications, by name. URLError when nobody answers."""
    asked = urllib.request.Request(f"{cluster.dashboard}/api/serve/applications/", headers=_authorization())
    with urllib.request.urlopen(asked, timeout=10) as reply:
        found: dict[str, Any] = json.load(reply)["applications"]
        return found


def _authorization() -> dict[str, str]:
    """A head that finds its user's token (`ray get-auth-token`; `ray.init()` makes one too) answers nobody else."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return {}
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text(encoding="utf-8").strip() if file.is_file() else "")
    return {"Authorization": f"Bearer {token}"} if token else {}


def deploy(cluster: Cluster, config: Path) -> None:
    """`serve deploy` of the file. ClusterError with Serve's words if it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "ray.serve.scripts", "deploy", "-a", cluster.dashboard, str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"serve deploy failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def await_running(cluster: Cluster, names: tuple[str, ...], say: Say, timeout_s: float) -> None:
    """Returns when every application runs; says what it waits for whenever that changes.

    Raises:
        ClusterError: one failed, with Serve's message, or time ran out, with what was still missing.
    """
    end = time.monotonic() + timeout_s
    said = ""
    while True:
        found = applications(cluster)
        states = {name: _state(found.get(name)) for name in names}
        for name, state in states.items():
            if state.startswith(("DEPLOY_FAILED", "UNHEALTHY")):
                raise ClusterError(f"{name}: {_reason(found[name])}")
        waiting = ", ".join(f"{name} ({state})" for name, state in states.items() if state != "RUNNING")
        if not waiting:
            return
        if waiting != said:
            say(f"waiting for {waiting}")
            said = waiting
        if time.monotonic() > end:
            raise ClusterError(f"not running after {timeout_s:g} s: {waiting}")
        time.sleep(_LOOK_EVERY_S)


def _state(application: Mapping[str, Any] | None) -> str:
    if application is None:
        return "not deployed yet"
    status = str(application["status"])
    deployments = application.get("deployments") or {}
    replicas = [replica for deployment in deployments.values() for replica in deployment.get("replicas", [])]
    running_now = sum(replica.get("state") == "RUNNING" for replica in replicas)
    if status == "RUNNING" or not replicas:
        return status
    return f"{status}, {running_now} of {len(replicas)} replicas running"


def _reason(application: Mapping[str, Any]) -> str:
    """The last lines of Serve's messages: the exception stands at their end."""
    messages = [str(application.get("message") or "")]
    messages += [str(d.get("message") or "") for d in (application.get("deployments") or {}).values()]
    lines = [line for message in messages for line in message.strip().splitlines() if line.strip()]
    return "\n".join(lines[-12:]) or str(application["status"])


def stop(cluster: Cluster, state: Path = STATE, patience_s: float = 5) -> None:
    """Ends the head and every process under it, and nothing else."""
    try:
        head = psutil.Process(cluster.pid)
        family = [head, *head.children(recursive=True)] if cluster.alive else []
    except psutil.NoSuchProcess:
        family = []
    # Ray's daemons end in order when asked to; what is left after that are workers with a model to drop.
    for process in family:
        if process.pid == cluster.pid or _name(process) in ("raylet", "gcs_server"):
            _signal(process.terminate)
    for process in _alive_after(family, patience_s):
        _signal(process.kill)
    _alive_after(family, patience_s)
    state.unlink(missing_ok=True)


def _alive_after(family: list[psutil.Process], patience_s: float) -> list[psutil.Process]:
    """Those that still run when all have ended or patience has. A zombie has ended: its parent is just slow."""
    end = time.monotonic() + patience_s
    while alive := [process for process in family if _runs(process)]:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _signal(send: Callable[[], None]) -> None:
    """Sends, unless the process has just ended by itself."""
    try:
        send()
    except psutil.NoSuchProcess:
        return
