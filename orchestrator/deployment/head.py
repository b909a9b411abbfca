"""The command that starts a Ray head, and the environment of the head and all its processes."""

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.deployment import processes
from orchestrator.deployment.listeners import free_ports
from orchestrator.deployment.privacy import compiled_folder
from quartet.config.base import IDLE_THREADS_SLEEP
from quartet.config.functions import VARIABLE as FUNCTIONS
from quartet.security.file_limit import raise_file_limit
from quartet.security.port import CALLBACK, CALLBACK_VARIABLE


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a head on 127.0.0.1."""

    gcs: int
    dashboard: int
    client: int
    agent: int

    @classmethod
    def free(cls, promised: Collection[int] = ()) -> "Ports":
        """Picks free ports, none of those `promised` to others."""
        return cls(*free_ports(4, promised))


def launch(
    ports: Ports, private: Mapping[str, str], folder: Path, secret: str, log: Path
) -> "subprocess.Popen[bytes]":
    """Starts a head.

    Args:
        ports: ports that it listens on.
        private: environment variables of all its processes.
        folder: folder for the files of its processes, vLLM's sockets included.
        secret: mark of all its processes.
        log: file for their output.
    """
    command = [
        # -P: with -m alone Python would look for modules in the current folder first.
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", str(ports.gcs)),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports.dashboard)),
        # Quartet does not use this port, but `ray start` refuses 0 and opens a default port without the option.
        *("--ray-client-server-port", str(ports.client)),
        # Ray's default is the same for every head of a machine.
        *("--dashboard-agent-listen-port", str(ports.agent)),
        # Ray's default range of worker ports contains Serve's port.
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--object-store-memory", str(512 << 20), "--disable-usage-stats"),
        # Two processes without a task here: no cloud adds nodes, and no driver of ours prints its workers' logs.
        *("--no-monitor", "--include-log-monitor", "false"),
    ]
    # A process that sets its title would overwrite its environment, the mark included.
    own = {"TMPDIR": str(folder), processes.MARK: secret, "SPT_NOENV": "1"}
    environment = _environment() | dict(private) | own
    # Inherited by all processes of the head, each of which has ports where connections can rest. Many systems begin
    # with 1024.
    raise_file_limit()
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def last_words(log: Path) -> str:
    """The last lines of a head's log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _environment() -> dict[str, str]:
    """Environment variables that every process of the cluster inherits."""
    defaults = {
        # Makes the gRPC proxy listen on QUARTET_GRPC_HOST, 127.0.0.1 when unset.
        CALLBACK_VARIABLE: CALLBACK,
        # When a proxy dies, all traffic stops until Serve has missed three of these checks; the default is 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        # The same for one that stands still, whose checks have no answer; the default is 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1.5",
        # Serve's controller then waits for a proxy that stands still to end by itself; the default is 5 s.
        "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S": "0.5",
        # A replica that is ill gets no time to end its calls, in which its GPU would not be free for another.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Calls go to the replica with the shorter queue. Lengths older than this are asked for again, and a replica
        # that does not say gets no calls. At Serve's own 10 s a frozen one goes on getting them for as long.
        "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "1",
        # By default Serve's controller looks after its deployments, and each process hands out metrics, ten times a
        # second, on cores that the models could use.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
        # By default gRPC writes 205 bytes for each broken TLS handshake into a file that is not rotated.
        "GRPC_VERBOSITY": "ERROR",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Outside of TMPDIR, which changes with each head, so that compiled code can be reused.
        "TORCHINDUCTOR_CACHE_DIR": str(compiled_folder()),
        # Ray starts workers at 15, where another program at 0 takes nine tenths of a core that both want.
        "RAY_worker_niceness": "5",
        # By default glibc gives the memory of large tensors back to the system at once, so that each pass of a model
        # on the CPU has it mapped and cleared again: up to a tenth of a pass. 32 MiB is the most that every glibc
        # takes, and a thread's arena of its own could not keep blocks as large.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
        "MALLOC_ARENA_MAX": "1",
        # Ray's processes count and time everything that their event loops do, for their log alone: an eighth of what
        # all processes take at rest.
        "RAY_event_stats": "0",
        # Reports of Ray's dashboard on each process's memory, in seconds and in milliseconds; Ray's own are 5 s.
        "METRICS_RECORD_INTERVAL_S": "60",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        **IDLE_THREADS_SLEEP,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    # Nor is the current folder put on PYTHONPATH, where its modules would hide those of Python, Ray and Quartet.
    environment = defaults | os.environ | {FUNCTIONS: str(Path.cwd())}
    environment.pop("RAY_AUTH_TOKEN", None)  # which Ray would prefer to the one in the file
    return environment
