"""The demo's services, which stay up from run to run, each run with a fresh critic."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.emulated.quartet import ROOT
from orchestrator.deployment.listeners import free_ports

MODELS = Path("models/reviews")
"""In the benchmark's folder, as in deploy/ppo.yaml."""
console = Console(width=120)


class Demo:
    """Runs `quartet train` in a folder that is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        http, grpc = free_ports(2)
        self._raw: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ppo.yaml").read_text())
        self._raw["http_options"]["port"], self._raw["grpc_options"]["port"] = http, grpc
        self._raw["orchestrator"] |= {
            "target": f"127.0.0.1:{grpc}",
            "checkpoint": {"every": 0, "journal": False},
            "log": {"tensorboard": False},
        }

    @property
    def orchestrator(self) -> dict[str, Any]:
        """The `orchestrator:` section."""
        section: dict[str, Any] = self._raw["orchestrator"]
        return section

    def train(self, name: str, seed: int, section: dict[str, Any]) -> Path:
        """Carries out a run; its folder. Its critic is a new one, whose head this seed makes."""
        critic = next(each for each in self._raw["applications"] if each["name"] == "critic")
        critic["args"]["seed"] = seed
        # A changed environment makes Serve replace the critic, and nothing else.
        critic["runtime_env"] = {"env_vars": critic["runtime_env"]["env_vars"] | {"QUARTET_RUN": name}}
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self._raw | {"orchestrator": section | {"name": name, "seed": seed}}))
        self.command("orchestrator.cli", "up", str(file))
        self.command("orchestrator.cli", "train", "--overwrite", str(file))
        return self.folder / "runs" / name

    def command(self, module: str, *arguments: str) -> None:
        """Runs a Python module in the folder; ends this program with its output if it fails."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            raise SystemExit(f"python -m {module} {' '.join(arguments)} failed:\n{said}")


@contextmanager
def demo(folder: Path) -> Iterator[Demo]:
    """Context with the demo's models, made once, and services that end with it."""
    folder.mkdir(parents=True, exist_ok=True)
    running = Demo(folder)
    running.command("orchestrator.cli", "down")  # of a call that was killed
    console.print("models")
    running.command("recipes.reviews", "--out", str(MODELS))
    try:
        yield running
    finally:
        running.command("orchestrator.cli", "down")
