"""Starts the emulated quartet on a Ray head of its own, and ends it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.emulated.pace import Pace
from benchmarks.ended import python_path
from orchestrator.commands.up import up
from orchestrator.config.run import OrchestratorConfig
from orchestrator.deployment import cluster
from orchestrator.deployment.file import Deployment
from orchestrator.deployment.listeners import free_ports
from tests.models import make_policy

ROOT = Path(__file__).parents[2]
SERVICES = ("rollout", "reward", "reference", "critic")
BATCH = 16
START_S = 240


@dataclass(frozen=True, slots=True)
class Quartet:
    """The services that run."""

    config: OrchestratorConfig
    _pace: Path

    def set(self, pace: Pace) -> None:
        """Makes the services take these times from now on."""
        pace.write(self._pace)


@contextlib.contextmanager
def quartet(pace: Pace) -> Iterator[Quartet]:
    """Context in which the quartet runs at this pace, in a folder of its own, which is the working directory."""
    os.environ |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        file, times = Path("emulated.yaml"), Path(folder, "pace.json")
        make_policy(Path(folder), kind="llama", tied=False)  # is looked at, and its tokenizer used
        pace.write(times)
        file.write_text(yaml.safe_dump(_raw(folder, times)))
        try:
            up(file, START_S, print)
            yield Quartet(Deployment.load(file).orchestrator, times)
        finally:
            if started := cluster.last():
                cluster.stop(started)


def _raw(folder: str, times: Path) -> dict[str, Any]:
    """deploy/ppo.yaml with the emulated applications and ports of its own."""
    raw: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ppo.yaml").read_text())
    http, grpc = free_ports(2)
    raw["http_options"]["port"], raw["grpc_options"]["port"] = http, grpc
    raw["applications"] = [
        {
            "name": service,
            "route_prefix": f"/{service}",
            "import_path": "benchmarks.emulated.replicas:build",
            "args": {"service": service, "pace": str(times), "batch": BATCH, "folder": folder},
        }
        for service in SERVICES
    ]
    raw["orchestrator"] = {
        "name": "emulated",
        "target": f"127.0.0.1:{grpc}",
        "data": {"path": "prompts"},
        "policy": {"model": folder, "optimizer": {"learning_rate": 1e-4}},
        "batch_size": BATCH,
        "prompts_per_call": BATCH,
        "sampling": {"max_new_tokens": 16},
        "algorithm": {"minibatch_size": BATCH},
    }
    return raw
